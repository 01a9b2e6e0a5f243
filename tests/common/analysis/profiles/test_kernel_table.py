"""Tables of kernels: columns that a source leaves out, and CSV files that are damaged."""

from common.analysis.profiles import kernel_table


def test_lines_may_end_in_any_way_and_messages_of_ncu_are_left_out(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n==PROF== message\r1,2\n\n3,4")
    assert kernel_table.read_frame(tmp_path / "t.csv").to_dict("list") == {"a": ["1", "3"], "b": ["2", "4"]}

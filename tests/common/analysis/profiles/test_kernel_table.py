"""Tables of kernels: columns that a source leaves out, and CSV files that are damaged."""

from common.analysis.profiles import kernel_table


def test_lines_may_end_in_any_way_and_messages_of_ncu_are_left_out(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n==PROF== message\r1,2\n\n3,4")
    assert kernel_table.read_frame(tmp_path / "t.csv").to_dict("list") == {"a": ["1", "3"], "b": ["2", "4"]}


def test_only_a_single_call_is_its_own_extreme_and_a_fill_is_known_by_its_name(tmp_path):
    columns = {"name": ["k", "__amd_rocclr_fillBufferAligned"], "duration_ns": [8.0, 5.0], "calls": [2, 1]}
    table = kernel_table.build("rocpd", tmp_path, columns).table
    assert list(table.min_ns.isna()) == [True, False] and list(table.category) == ["kernel", "memset"]

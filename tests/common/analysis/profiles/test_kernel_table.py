"""Tables of kernels: columns that a source leaves out, and CSV files that are damaged."""

from common.analysis.profiles import kernel_table


def test_what_a_source_leaves_out_is_filled_in_and_starts_count_from_the_first(tmp_path):
    columns = {"name": ["gemm", "Memcpy HtoD"], "duration_ns": [40, 10], "calls": [4, 1]}
    table = kernel_table.build("x", tmp_path, columns).table
    assert list(table.columns) == list(kernel_table.COLUMNS) and list(table.category) == ["kernel", "memcpy"]
    assert table.start_ns.isna().all() and table.min_ns.isna().tolist() == [True, False]
    assert table.max_ns[1] == 10, "a single call is its own maximum"

    clock = 1_900_000_000_000_000_007
    columns = {"name": ["a", "b"], "start_ns": [clock + 1, clock], "duration_ns": [1, 1]}
    assert list(kernel_table.build("x", tmp_path, columns).table.start_ns) == [1, 0]


def test_lines_may_end_in_any_way_and_messages_of_ncu_are_left_out(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n==PROF== message\r1,2\n\n3,4")
    assert kernel_table.read_frame(tmp_path / "t.csv").to_dict("list") == {"a": ["1", "3"], "b": ["2", "4"]}

"""Numbers, times and tables: readable for a person, no wider than a terminal, and safe in Markdown
and CSV.
"""

import csv
import io

from tracepage.show import run_facts, tables

import pytest


@pytest.mark.parametrize(
    "value, text",
    [
        (None, ""),
        ("a", "a"),
        (1234567, "1,234,567"),
        (999.7, "1,000"),
        (1.2345, "1.23"),
        (0.0012345, "0.00123"),
    ],
)
def test_a_number_has_three_significant_digits(value, text):
    assert tables.format_number(value) == text


@pytest.mark.parametrize(
    "ms, text", [(0.0123, "12.3 us"), (1, "1 ms"), (999.4, "999 ms"), (83_400, "83.4 s")]
)
def test_a_time_is_shown_in_the_unit_of_its_size(ms, text):
    assert tables.format_time(ms) == text


@pytest.mark.parametrize("rate, text", [(77.91e9, "77.9 GFLOP/s"), (67e12, "67 TFLOP/s")])
def test_a_rate_is_shown_in_the_unit_of_its_size(rate, text):
    assert tables.format_rate(rate) == text


@pytest.mark.parametrize("threads, text", [(None, "X"), (1, "X, 1 thread"), (2, "X, 2 threads")])
def test_a_device_has_its_threads(threads, text):
    assert run_facts.device({"device": {"name": "X", "threads": threads}}) == text


def test_a_wide_table_loses_the_least_columns_and_names_them():
    header = ["name", *(f"number of things {i}" for i in range(8)), "last"]
    rows = [["x" * 200, *range(8), 9.5], ["short", *range(8), None]]
    text = tables.text(header, rows, least=["number of things 3"], elsewhere="all.csv")
    assert all(len(line) <= 120 for line in text.splitlines())
    first, long, short, note = text.splitlines()
    assert (
        "number of things 3" not in first
        and first.endswith("last")
        and "number of things 0" in first
    )
    assert long.startswith("xxxxx") and "..." in long and short.startswith("short ")
    assert note.startswith(
        "columns left out: number of things 3, number of things "
    ) and note.endswith("(all.csv has all)")
    assert tables.text(["a", "b"], [["x", 1], ["yy", 1000.0]]) == "a       b\nx       1\nyy  1,000"


def test_markup_is_escaped_in_cells_and_where_markdown_sees_no_code():
    lines = tables.markdown(
        ["a|b", "n", "kernel"], [["<b>|", 1.5, "f<int>|"]], code=["kernel"]
    ).splitlines()
    assert lines == [
        "| a\\|b | n | kernel |",
        "| --- | ---: | --- |",
        "| &lt;b>\\| | 1.5 | `f<int>\\|` |",
    ]
    assert not any("<b>" in tables.markdown_text(text) for text in ("`a\n\n<b>`", "`a`<b>", "<b>"))


def test_csv_holds_numbers_in_full():
    text = tables.csv_text(["a", "b"], [["x,y", -0.1234567], ["plain", None], ["z", 1e9]])
    assert list(csv.reader(io.StringIO(text))) == [
        ["a", "b"],
        ["x,y", "-0.1234567"],
        ["plain", ""],
        ["z", "1000000000.0"],
    ]

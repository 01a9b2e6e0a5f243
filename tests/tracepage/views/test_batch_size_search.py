"""The report on a search for a batch size."""

from tests import records
from tracepage.files import write_json
from tracepage.views.batch_size_search import render_batch_search


def trial(size: int, status: str, ms: float | None = None) -> dict:
    step = ms and {"median": ms, "p20": ms, "p80": ms, "count": 5}
    rate = ms and size / ms
    peak = ms and 100.0 + size
    return {
        "batch_size": size,
        "status": status,
        "step_ms": step,
        "tokens_per_second": rate,
        "peak_mib": peak,
    }


def test_a_report_with_trials_out_of_memory(tmp_path):
    trials = [trial(size, "ok", float(size)) for size in (1, 2, 4, 8, 10)]
    trials += [trial(16, "over target", 16.0), trial(64, "out of memory")]
    answer = {"ended": "batch size 16 does not fit: over target", "batch_size": 10, "reason": "it"}
    write_json(
        tmp_path / "batch_search.json",
        records.batch_search(trials, answer, device__memory_mib=200.0),
    )
    text = render_batch_search(tmp_path / "batch_search.json").terminal()
    lines = [line.split() for line in text.splitlines()]
    assert ["10", "10", "10", "10", "1", "110", "55", "ok"] in lines
    assert ["64", "out", "of", "memory"] in lines
    assert ["16", "16", "16", "16", "1", "116", "58", "over", "target"] in lines

"""All ranks of a job: the verdict, a bar and a row for each rank, and each kind of collective."""

from typing import Any

from tracepage.causes import rank_waits
from tracepage.causes.rank_waits import Job
from tracepage.show import tables
from tracepage.show.report import Report

BARS = 32
SHOWN = 0.5  # % of the step, from which a part is in its bar
WAITING = "waits for ranks"
ABOUT = (
    "Waiting for ranks and transfers count where nothing computes beside them; hidden "
    "communication runs beside computing. Other waits are the rank's own."
)
ABOUT_COLLECTIVES = (
    "A collective ends together on all its ranks, which aligns their clocks. Its transfer begins "
    "when the last rank arrives. Waiting is a mean of the ranks, and counts beside computing too."
)


def add_sections(page: Report, job: Job) -> None:
    """Adds all but the timeline."""
    page.verdict(rank_waits.verdict(job)["sentence"])
    longest = max(rank.step_ms for rank in job.ranks.values())
    for number in list(job.ranks)[:BARS]:
        parts = []
        for name, ms in _parts(job, number).items():
            share = 100 * ms / longest
            if share >= SHOWN:
                parts.append((name, share, f"{name} {tables.format_time(ms)}"))
        name, share, text = parts[0]
        page.bar([(name, share, f"rank {number}: {text}"), *parts[1:]])
    page.section("Ranks")
    page.table(*_rank_rows(job))
    page.text(ABOUT, *job.notes)
    page.section("Collectives")
    header = ["collective", "group", "ranks", "a step", "ms of transfer", "ms waited a step"]
    header += ["waited for", "% of it"]
    page.table(*tables.filled(header, rank_waits.kinds(job)), top=BARS)
    page.text(ABOUT_COLLECTIVES)


def _parts(job: Job, number: int) -> dict[str, float]:
    """ms of a rank's step: computing, transfer, waiting for ranks, and its own waits by cause."""
    rank = job.ranks[number]
    times = {
        "computing": rank.computing_ms,
        "communication": job.transfer_ms(number),
        WAITING: job.waiting_ms[number],
        "sends and receives": rank.sends_ms,
    }
    for part in rank.parts:
        if part["cause"] not in ("work", "communication"):
            times[part["cause"].replace("_", " ")] = part["ms"]
    between = rank.step_ms - sum(times.values())
    return times | {"between kernels": max(between, 0.0)}


def _rank_rows(job: Job) -> tables.Table:
    header = ["rank", "step ms", "computing", "hidden communication", "transfer", WAITING]
    rows: list[list[Any]] = []
    for number, rank in job.ranks.items():
        times = _parts(job, number)
        computing, transfer, waiting, *_ = times.values()
        waits = dict(list(times.items())[3:])
        cause = max(waits, key=lambda name: waits[name])
        row = [number, rank.step_ms, computing, rank.hidden_ms, transfer, waiting]
        rows.append([*row, sum(waits.values()), cause])
    return [*header, "other waits", "most of them"], rows


def content(job: Job) -> dict[str, Any]:
    """The content of the JSON file."""
    ranks = []
    for number, rank in job.ranks.items():
        times = {
            "step_ms": rank.step_ms,
            "computing_ms": rank.computing_ms,
            "hidden_ms": rank.hidden_ms,
            "transfer_ms": job.transfer_ms(number),
            "waiting_ms": job.waiting_ms[number],
        }
        ranks.append({"rank": number, "file": str(rank.path), **times, "parts": rank.parts})
    keys = ("collective", "group", "ranks", "count", "transfer_ms", "waiting_ms", "last", "share")
    rows = [dict(zip(keys, row, strict=True)) for row in rank_waits.kinds(job)]
    verdict = rank_waits.verdict(job)
    return {"verdict": verdict, "ranks": ranks, "collectives": rows, "notes": job.notes}

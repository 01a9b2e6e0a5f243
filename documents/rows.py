"""A table of records: a row for each file, or for each row of a list in it, with the columns that
its marker names.

A column is a name, `HEAD = KEY`, or `HEAD = KEY / NUMBER`. A key leads into the row, with a dot for
each level, such as `step_ms.median`. The record of a training run also has the columns of
`run_facts.columns` and of `profile_facts`; that of a decoding run has "% of data sheet".
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT
from common.config import PRESETS
from tracepage import files
from tracepage.cost import peaks
from tracepage.errors import UsageError
from tracepage.records import run_record, step_profile
from tracepage.records.study_files import Decoding
from tracepage.show import run_facts, tables
from tracepage.views import bandwidth

# The spans that a profile may have.
SPANS = ("embed", "norm", "attention", "mlp", "residual", "loss", "optimizer", "other")
DECODING = files.schema_of(Decoding)
Facts = Mapping[str, object]


def find(patterns: Iterable[str]) -> list[Path]:
    """The files of patterns such as `results/h200/v1_*.json`, those of one pattern in the order of
    presets and names.

    UsageError: a pattern has none.
    """
    order = [*PRESETS, ""]
    paths: list[Path] = []
    for pattern in patterns:
        matching = list(ROOT.glob(pattern))
        if not matching:
            raise UsageError(f"there is no {pattern}: results/ has scripts that measure such files")
        paths += sorted(matching, key=lambda path: (order.index(preset_of(path)), path))
    return paths


def preset_of(path: Path) -> str:
    """The preset in a file's name, or ""."""
    return next((part for part in path.stem.split("_") if part in PRESETS), "")


def rows(columns: Sequence[str], paths: Sequence[Path], part: str = "") -> str:
    """A Markdown table below the conditions of its records; `part` is the key of the list whose
    rows it has.
    """
    records = []
    cells = []
    for path in paths:
        record = files.read_json(path)
        records.append(record)
        facts: dict[str, object] = {}
        if record.get("schema") == run_record.SCHEMA:
            facts = run_facts.columns(run_record.read_timed(path))
        if record.get("schema") == DECODING:
            facts["% of data sheet"] = reading_percent(record)
        if part and "device" in record:
            facts["device"] = run_facts.device(record)
        for row in value_of(record, part) if part else [record]:
            cells.append([_cell(column, row, facts, path) for column in columns])
    heads = [column.partition(" = ")[0] for column in columns]
    return f"{conditions(records)}\n\n{tables.markdown(heads, cells)}"


def reading_percent(run: Mapping[str, Any]) -> float | None:
    """Bytes a second of a decoding step in percent of the data sheet's bandwidth, as decoding only
    reads: a copy, which also writes, is slower. None if the device is not listed.
    """
    known = peaks.datasheet(run["device"]["name"], run["device"].get("multiprocessors"))
    return 100 * run["bytes_per_second"] / known["bandwidth"] if known else None


def _cell(column: str, row: Mapping[str, Any], facts: Facts, path: Path) -> object:
    """The value of a column in a row; `facts` are those of its file."""
    head, _, source = column.partition(" = ")
    key, _, divisor = (source or head).partition(" / ")
    if "ms/step" in facts and key not in facts and key.partition(".")[0] not in row:
        facts = profile_facts(path)  # the row is the record of a run
    value: Any = facts[key] if key in facts else value_of(row, key)
    return value / float(divisor) if divisor and value is not None else value


def value_of(record: Any, key: str) -> Any:
    """The value at a key with dots; None where a level below the first is None or has no such
    entry.
    """
    first, *more = key.split(".")
    value = record[first]
    for name in more:
        value = value.get(name) if value is not None else None
    return value


def conditions(records: Iterable[Mapping[str, Any]]) -> str:
    """Devices, packages, hosts and dates of records in a line."""
    known = [record for record in records if "device" in record]
    facts = [run_facts.device(record) for record in known]
    for record in known:
        facts += [f"{name} {version}" for name, version in record.get("packages", {}).items()]
        facts.append(f"torch {record['environment']['torch']}")
    host = run_facts.host(known)
    if host:
        facts.append(host)
    dates = sorted({record["date"][:10] for record in known})
    if dates:
        facts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    return "; ".join(dict.fromkeys(facts))


@functools.cache
def profile_facts(path: Path) -> Facts:
    """Facts of a step in the profile beside a run's record: limits, launches, and the share of each
    span in a profiled step.
    """
    run = run_record.read_timed(path)
    profile = step_profile.read(path.with_name(f"{path.stem}_profile.json.gz"))
    step_ms = sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
    limits = bandwidth.step_limits(profile, run)
    shares = {f"{span} %": 0.0 for span in SPANS}
    for span, phases in step_profile.span_milliseconds(profile).items():
        shares[f"{span} %"] = 100 * sum(phases.values()) / step_ms
    rest = limits["GPU idle %"]
    if rest is None:
        rest = 100 - sum(shares.values())
    return {"rest %": rest, **shares, **limits}

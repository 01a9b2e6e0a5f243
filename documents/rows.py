"""A table of records: a row for each file, or for each row of a list in it, with the columns that
its marker names.

A column is a name, `HEAD = KEY`, or `HEAD = KEY / NUMBER`. A key leads into the row, with a dot for
each level, such as `step_ms.median`. The record of a training run also has the columns of
`run_facts.columns` and of `profile_facts`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT
from common.config import PRESETS
from tracepage import files
from tracepage.errors import UsageError
from tracepage.records import run_record, step_profile
from tracepage.show import run_facts, tables
from tracepage.views import bandwidth

# that a profile may have
SPANS = ("embed", "norm", "attention", "mlp", "residual", "loss", "optimizer", "other")


def found(patterns: Iterable[str]) -> list[Path]:
    """The files of patterns such as `results/h200/v1_*.json`, those of one pattern in the order of
    presets and names.

    UsageError: a pattern has none.
    """
    paths: list[Path] = []
    for pattern in patterns:
        own = list(ROOT.glob(pattern))
        if not own:
            raise UsageError(f"there is no {pattern}: results/ has scripts that measure such files")
        paths += sorted(own, key=lambda path: ([*PRESETS, ""].index(preset_of(path)), path))
    return paths


def preset_of(path: Path) -> str:
    """The preset in a file's name, or ""."""
    return next((part for part in path.stem.split("_") if part in PRESETS), "")


def rows(columns: Sequence[str], paths: Sequence[Path], part: str = "") -> str:
    """A Markdown table below the conditions of its records; `part` is the key of the list whose
    rows it has.
    """
    records = [files.read_json(path) for path in paths]
    body = []
    for path, record in zip(paths, records, strict=True):
        facts = (
            run_facts.columns(run_record.read_timed(path))
            if record.get("schema") == run_record.SCHEMA
            else {}
        )
        if part and "device" in record:
            facts["device"] = run_facts.device(record)
        for row in value_of(record, part) if part else [record]:
            body.append([_cell(column, row, facts, path) for column in columns])
    heads = [column.partition(" = ")[0] for column in columns]
    return f"{conditions(records)}\n\n{tables.markdown(heads, body)}"


def _cell(column: str, row: Mapping[str, Any], facts: Mapping[str, object], path: Path) -> object:
    """The value of a column in a row; `facts` are those of its file."""
    head, _, source = column.partition(" = ")
    key, _, divisor = (source or head).partition(" / ")
    # the row is the record of a run
    if "ms/step" in facts and key not in facts and key.partition(".")[0] not in row:
        facts = profile_facts(path)
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
    """Devices, packages and dates of records in a line."""
    known = [record for record in records if "device" in record]
    facts = [run_facts.device(record) for record in known]
    for record in known:
        facts += [f"{name} {version}" for name, version in record.get("packages", {}).items()]
        facts.append(f"torch {record['environment']['torch']}")
    dates = sorted({record["date"][:10] for record in known})
    facts += [" to ".join([dates[0], dates[-1]][: len(dates)])] if dates else []
    return "; ".join(dict.fromkeys(facts))


@functools.cache
def profile_facts(path: Path) -> dict[str, object]:
    """What the profile beside a run's record says of a step: limits, launches, and the share of
    each span in a profiled step.
    """
    run = run_record.read_timed(path)
    profile = step_profile.read(path.with_name(f"{path.stem}_profile.json.gz"))
    profiled_ms = sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
    limits = bandwidth.step_limits(profile, run)
    shares = dict.fromkeys((f"{span} %" for span in SPANS), 0.0)
    for span, phases in step_profile.span_milliseconds(profile).items():
        shares[f"{span} %"] = 100 * sum(phases.values()) / profiled_ms
    idle = limits["GPU idle %"]
    return {"rest %": 100 - sum(shares.values()) if idle is None else idle, **shares, **limits}

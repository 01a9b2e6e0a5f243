"""The critical paths of several versions side by side: one column a profile, before and after.

The steps should be alike: all captured, or all eager. Device, model, shape, number format and PyTorch must be the same.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common.analysis.output import run_facts
from common.analysis.output.report import Report
from common.analysis.profiles import graph_replays
from common.analysis.reports import critical_path
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.step_profile import Profile


def compare(paths: Sequence[Path]) -> Report:
    """A table of the steps in these profiles, in this order."""
    profiles = [step_profile.read(path) for path in paths]
    conditions = [run_record.conditions(profile["run"]) for profile in profiles]
    for path, own in zip(paths[1:], conditions[1:], strict=True):
        run_record.require_equal((paths[0], path), (conditions[0], own), "the version")
    columns = [_column(path, profile) for path, profile in zip(paths, profiles, strict=True)]
    runs = dict(zip(_names(paths, profiles), (profile["run"] for profile in profiles), strict=True))
    report = Report("Critical paths")
    report.text(run_facts.describe(profiles[0]["run"]))
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    report.table(["quantity", *runs], rows, csv="critical_paths")
    report.facts([(name, f"{path}, from {run_facts.origin(runs[name])}") for name, path in zip(runs, paths, strict=True)])
    report.text(*run_facts.doubts(runs))
    return report


def _column(path: Path, profile: Profile) -> dict[str, float]:
    step = critical_path.step(graph_replays.load(path.parent / profile["trace"]))
    if step is None:
        raise UsageError(f"{path} holds no kernels of a GPU: give profiles that were taken on one")
    return {"median step without the profiler, us": 1e3 * profile["run"]["step_ms"]["median"]} | critical_path.summary(step)


def _names(paths: Sequence[Path], profiles: Sequence[Profile]) -> list[str]:
    """The version of each, and whether its step was captured; with the file where two are the same."""
    runs = [profile["run"] for profile in profiles]
    names = [f"{run['version']}{', captured' * bool(run.get('settings', {}).get('capture_step'))}" for run in runs]
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name}, {path.stem}" for name, path in zip(names, paths, strict=True)]

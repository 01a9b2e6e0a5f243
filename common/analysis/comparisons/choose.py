"""Chooses the two runs to compare where folders hold several: the newest two that the analysis accepts as comparable.

Only the conditions of each run are kept while the files are read, because a folder can hold thousands of profiles.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import files
from common.analysis.profiles import load_kernels
from common.errors import UsageError
from common.progress import progress
from common.records import run_record, step_profile
from common.records.run_record import TimedRun


class Candidate(NamedTuple):
    """The part of a run that the choice needs."""

    path: Path  # the run's record, or a profile, which holds one
    version: str
    date: str  # when the run began
    conditions: dict[str, Any]  # of `run_record.conditions`
    unusable: list[str]  # why its step times cannot be used
    attention_only: bool | None  # whether the profile is of the attention alone; None: there is none, or no profiled step in it

    @property
    def age(self) -> tuple[str, str]:
        return self.date, self.path.name

    @property
    def run(self) -> TimedRun:
        """The record, read again."""
        content = files.read_json(self.path)
        return content["run"] if content["schema"] == step_profile.SCHEMA else content


Pair = tuple[Candidate, Candidate]


class Choice(NamedTuple):
    """The newest comparable pair; where there is none, the pair with the fewest differences, and these."""

    pair: Pair
    differences: list[str]


def read(path: Path) -> Candidate | None:
    """A run record or a profile; None if the file is neither, or has no finished step."""
    content = files.read_json(path)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in (run_record.SCHEMA, step_profile.SCHEMA):
        return None
    is_profile = schema == step_profile.SCHEMA
    files.check(path, content, step_profile.Profiled if is_profile else run_record.RunRecord)
    run = run_record.check(path, content["run"] if is_profile else content)
    if not run_record.finished(run):
        return None
    attention_only = content["attention_only"] if is_profile and content["profiled_steps"] else None
    conditions, unusable = run_record.conditions(run), run_record.unusable(path, run)
    return Candidate(path, run["version"], run["date"], conditions, unusable, attention_only)


def newest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The newest run of each kind. Runs of one kind differ from any other run in the same."""
    found: dict[str, Candidate] = {}
    with progress("reading the runs") as note:
        for number, one in enumerate(candidates, 1):
            note(f"{number:,} runs")
            kind = json.dumps([one.conditions, len(one.unusable), one.attention_only])
            if kind not in found or one.age > found[kind].age:
                found[kind] = one
    return list(found.values())


def choose(ours: Sequence[Candidate], theirs: Sequence[Candidate], differences: Callable[[Pair], list[str]]) -> Choice | None:
    """The newest pair without differences, else the newest of those with the fewest. None: one of the two has nothing.

    A pair is as old as the older of its runs.
    """
    choices = [Choice(pair, differences(pair)) for pair in itertools.product(ours, theirs)]
    return max(choices, key=lambda choice: (-len(choice.differences), *sorted(one.age for one in choice.pair)), default=None)


def run_differences(pair: Pair) -> list[str]:
    """Why the step times of the two cannot be compared."""
    ours, theirs = pair
    return ours.unusable + theirs.unusable + run_record.differences(ours.conditions, theirs.conditions)


def profile_differences(pair: Pair) -> list[str]:
    """Why the two profiles cannot be compared."""
    ours, theirs = (one.conditions | {"attention only": one.attention_only} for one in pair)
    return run_record.differences(ours, theirs)


def profiles(before: Sequence[Path], after: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The two files to compare, and a note for each newer profile that was passed over.

    The files are the newest profiles in the two groups of folders that can be compared, or else the newest. A file stands for
    itself, and so does a folder without profiles, which may hold the files of another profiler.
    """
    groups = [[path for place in places for path in _profiles(place)] for places in (before, after)]
    if not all(groups) or max(map(len, groups)) == 1:
        return [group[0] if group else places[0] for group, places in zip(groups, (before, after), strict=True)], []
    ours, theirs = (newest(_profiled(group)) for group in groups)
    choice = choose(ours, theirs, profile_differences)
    if not choice:
        return [group[0] for group in groups], []
    notes = []
    for chosen, every, other in zip(choice.pair, (ours, theirs), reversed(choice.pair), strict=True):
        latest = max(every, key=lambda one: one.age)
        if latest != chosen:
            differing = ", ".join(profile_differences((latest, other)))
            notes.append(f"passed over {latest.path}, which is newer than {chosen.path} but differs in {differing}")
    return [one.path for one in choice.pair], notes


def _profiled(paths: Iterable[Path]) -> Iterator[Candidate]:
    """The profiles with a profiled step; a damaged one is passed over."""
    for path in paths:
        with contextlib.suppress(UsageError):
            if (found := read(path)) and found.attention_only is not None:
                yield found


def _profiles(place: Path) -> list[Path]:
    """The profile itself, or those in and below a folder, the newest first; none if a file is of another profiler."""
    if place.is_dir():
        return load_kernels.find(place).get("profile", [])
    return [place] if place.is_file() and load_kernels.recognize(place) == "profile" else []

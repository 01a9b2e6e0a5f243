"""The agendas of INSTRUCTOR_GUIDE.md add up, and each problem in them is on its page with the same minutes."""

import re
from typing import NamedTuple

from common.documents import reference
from tests.conftest import ROOT, cells

import pytest

GUIDE = (ROOT / "INSTRUCTOR_GUIDE.md").read_text(encoding="utf-8")
AGENDAS = re.findall(r"^## ([^\n]*): (\d+) minutes\n(.*?)(?=^## )", GUIDE, re.DOTALL | re.MULTILINE)
LINKED = re.compile(r"\[\((\w[\w ]*)\)\]\(([^#)]+)#([^)]+)\)\s+(\d+)")
PROBLEMS = {(problem.page.relative_to(ROOT).as_posix(), problem.anchor): problem for problem in reference.problems()}


class Row(NamedTuple):
    start: int  # minutes from the beginning
    minutes: int
    is_break: bool
    talk: int
    problems: list[tuple[str, str, str, int]]  # name, page, anchor, minutes


def rows(agenda: str) -> list[Row]:
    """The rows of the agenda's table; the minutes of a break stand in brackets."""
    found = []
    for start, minutes, _, talk, problems in cells(agenda)[1:]:
        hours, past = start.split(":")
        named = [(name, page, anchor, int(time)) for name, page, anchor, time in LINKED.findall(problems)]
        found.append(Row(60 * int(hours) + int(past), int(minutes.strip("()")), minutes[0] == "(", int(talk or 0), named))
    return found


def test_there_is_half_a_day_and_a_full_day():
    assert [(name, minutes) for name, minutes, _ in AGENDAS] == [("Half a day", "195"), ("A full day", "390")]


each_agenda = pytest.mark.parametrize("name, minutes, agenda", AGENDAS, ids=[name for name, *_ in AGENDAS])


@each_agenda
def test_the_minutes_add_up_and_each_problem_has_some(name, minutes, agenda):
    table = rows(agenda)
    assert sum(row.minutes for row in table if not row.is_break) == int(minutes)
    clock = 0
    for row in table:
        assert row.start == clock, row
        assert row.is_break or row.minutes == row.talk + sum(time for *_, time in row.problems), row
        clock += row.minutes
    assert agenda.count(".md#problem") == len(LINKED.findall(agenda)) > 0


def test_each_problem_is_on_its_page_with_these_minutes():
    """In the agendas and in the blocks below them."""
    named = {(page, anchor, name, int(time)) for name, page, anchor, time in LINKED.findall(GUIDE)}
    assert named <= {(*place, problem.name, problem.laptop) for place, problem in PROBLEMS.items()}


def test_half_a_day_has_six_to_eight_problems_of_the_full_day_which_has_all_that_are_a_must():
    half, full = ([(page, anchor) for row in rows(agenda) for _, page, anchor, _ in row.problems] for *_, agenda in AGENDAS)
    assert 6 <= len(half) <= 8 and set(half) <= set(full)

    full = {(page, anchor) for row in rows(AGENDAS[1][2]) for _, page, anchor, _ in row.problems}
    assert full == {place for place, problem in PROBLEMS.items() if problem.must}


def prerequisites(problem: reference.Problem) -> set[str]:
    """The names in "After (setup), and (triage of the debugging exercise)"."""
    return set(re.findall(r"\((?:problem )?(\w+)[^)]*\)", problem.after))


def test_what_a_problem_comes_after_is_a_problem():
    known = {name for problem in PROBLEMS.values() for name in (problem.name, problem.number)}
    assert set().union(*map(prerequisites, PROBLEMS.values())) <= known


@each_agenda
def test_what_a_problem_comes_after_stands_before_it(name, minutes, agenda):
    seen = set()
    for problem in (PROBLEMS[page, anchor] for row in rows(agenda) for _, page, anchor, _ in row.problems):
        assert prerequisites(problem) <= seen, problem
        seen |= {problem.name, problem.number}


@pytest.mark.parametrize("page", reference.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_problem_has_a_line_of_minutes(page):
    on_page = [problem.anchor for problem in reference.problems() if problem.page == page]
    assert [reference.anchor(heading.string) for heading, _ in reference.headings(page)] == on_page

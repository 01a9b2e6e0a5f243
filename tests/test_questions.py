"""The questions of the pages: one right answer each, links and records that exist, and numbers that
their records give; how they are asked, and shown in the slides.
"""

import io
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import questions
from common import config
from tests.conftest import ROOT
from tracepage import files
from tracepage.cost import footprint, optimization_targets
from tracepage.errors import UsageError
from tracepage.records import step_profile

import pytest

ALL = [(page, question) for page, asked in questions.PAGES.items() for question in asked]
each_question = pytest.mark.parametrize(
    "page, question",
    ALL,
    ids=[f"{Path(page).parts[0]}-{number}" for number, (page, _) in enumerate(ALL)],
)
# Not the 4 of "Version 4", the 16 of bf16, or the 200 of an H200.
NUMBER = re.compile(r"(?<![\w.,])(?<!Version )\d+(?:,\d{3})*(?:\.\d+)?(?=x?(?!\w))")


def leaves(value: Any, key: str) -> Any:
    """What a key leads to in a record: names with dots, which a list hands on to its rows;
    [NAME=VALUE] picks rows.
    """
    for name, chosen in re.findall(r"([\w]+)(?=[.\[]|$)|\[(.*?)\]", key):
        if chosen:
            column, _, wanted = chosen.partition("=")
            value = [row for row in value if str(row.get(column)) == wanted]
            assert value, f"no row with {chosen}"
        elif isinstance(value, list):
            value = [row[name] for row in value]
            if isinstance(value[0], list):
                value = [row for rows in value for row in rows]
        else:
            value = value[name]
    return value


def recorded(source: str) -> Any:
    """The values at FILE#KEY."""
    file, _, key = source.partition("#")
    if file.endswith((".json", ".gz")):
        return leaves(files.read_json(ROOT / file), key)
    return float(re.findall(key, (ROOT / file).read_text(encoding="utf-8"))[0])


def activations(preset: str) -> dict[str, int]:
    resolved = config.resolve(preset)
    training = resolved.training
    return footprint.activations(resolved.model, training.batch_size, training.sequence_length)


def targets(file: str) -> dict[str, optimization_targets.Target]:
    step = optimization_targets.mean_step(step_profile.read(ROOT / file))
    return {target["name"]: target for target in optimization_targets.targets(step)}


KNOWN = {
    "activations": activations,
    "targets": targets,
    "median": statistics.median,
    "log": math.log,
    "ceil": math.ceil,
}


def test_eight_pages_have_three_questions_each_and_every_letter_is_right():
    assert [len(asked) for asked in questions.PAGES.values()] == [3] * 8
    assert all((ROOT / page).is_file() for page in questions.PAGES)
    letters = ["because" in answer for _, question in ALL for answer in question["answers"]]
    assert all(sum(letters[place::4]) >= 3 for place in range(4))


@each_question
def test_one_answer_is_right_and_each_other_leads_to_a_heading(page, question):
    answers = question["answers"]
    assert len({answer["text"] for answer in answers}) == 4
    assert [answer.keys() for answer in answers if "because" in answer] == [{"text", "because"}]
    for answer in answers:
        if "because" not in answer:
            assert answer.keys() == {"text", "shows", "back"}
            back, _, heading = answer["back"].partition(", ")
            headings = re.findall(r"^#+ (.*)$", (ROOT / back).read_text("utf-8"), re.MULTILINE)
            assert heading in headings, back


@each_question
def test_each_number_of_a_question_and_its_right_answer_is_that_of_its_record(page, question):
    [right] = [answer for answer in question["answers"] if "because" in answer]
    written = f"{question['question']} {right['text']} {right['because']}"
    assert question["numbers"]
    assert set(NUMBER.findall(written)) == set(question["numbers"])
    known = {name: recorded(source) for name, source in question.get("records", {}).items()}
    for number, calculation in question["numbers"].items():
        value = eval(str(calculation), KNOWN | known)
        _, _, decimals = number.partition(".")
        assert f"{value:,.{len(decimals)}f}" == number, calculation


def ask(monkeypatch, typed: str, *flags: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr(sys, "argv", ["questions.py", *flags])
    questions.main()


def test_a_wrong_answer_is_told_what_it_shows_and_a_right_one_why(monkeypatch, capsys):
    page = "version1_pytorch_baseline/README.md"
    monkeypatch.chdir(ROOT / "version1_pytorch_baseline")
    wrong, *others = (question["answers"] for question in questions.PAGES[page])
    typed = ["abcd"[["because" in answer for answer in answers].index(True)] for answers in others]
    ask(monkeypatch, "\n".join(["a", *typed]), "README.md")
    shown = capsys.readouterr().out
    assert f'{wrong[0]["shows"]} Go back to "Capture" in CONCEPTS.md.' in shown
    assert shown.count("Right. ") == 2
    assert shown.endswith("2 of 3 at the first attempt\n")


def test_what_is_no_letter_is_asked_again_and_an_early_end_is_refused(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError, match="the input ended"):
        ask(monkeypatch, "e\n\n", "version4_ultra_fused/README.md")
    assert capsys.readouterr().out.count("a, b, c or d: ") == 3


def test_a_page_without_questions_is_refused_with_those_that_have_some(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError, match="no questions on LOG.md; .* version3_triton/README.md"):
        ask(monkeypatch, "", "LOG.md")


def test_the_slides_show_every_question_once_and_its_answers_in_the_notes(monkeypatch, capsys):
    ask(monkeypatch, "", "--slides")
    slides = re.split(r"^---$", capsys.readouterr().out, flags=re.MULTILINE)
    for _, question in ALL:
        [slide] = [text for text in slides if f"### {question['question']}\n" in text]
        shown, _, notes = slide.partition("<!--")
        assert all(answer["text"] in shown for answer in question["answers"])
        assert "Right. " in notes and "Right. " not in shown

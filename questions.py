"""Asks the three questions of a page, and says what a wrong answer shows.

python questions.py version1_pytorch_baseline/README.md
python questions.py --slides    # the slides of the day, with each page's questions
"""

import argparse
import os
import re
import sys
from pathlib import Path

from tracepage.command_line import exit_code, parse, require
from tracepage.errors import UsageError

require(["yaml"], "run `make setup`, then `source .venv/bin/activate`")

import yaml

ROOT = Path(__file__).resolve().parent
PAGES = yaml.safe_load((ROOT / "questions.yaml").read_text(encoding="utf-8"))


def lettered(question: dict) -> dict[str, dict]:
    """The answers of a question by the letters a, b, c, d."""
    return dict(zip("abcd", question["answers"], strict=True))


def verdict(answer: dict) -> str:
    """Why an answer is right, or what it shows and the page and heading to go back to."""
    if "because" in answer:
        return f"Right. {answer['because']}"
    page, _, heading = answer["back"].partition(", ")
    return f'{answer["shows"]} Go back to "{heading}" in {page}.'


def ask(question: dict) -> bool:
    """Whether the letter on stdin is that of the right answer. UsageError: stdin ends first."""
    answers = lettered(question)
    print(f"\n{question['question']}")
    for letter, answer in answers.items():
        print(f"  {letter}  {answer['text']}")
    print("a, b, c or d: ", end="", flush=True)
    for line in sys.stdin:
        if line.strip() in answers:
            answer = answers[line.strip()]
            print(verdict(answer))
            return "because" in answer
        print("a, b, c or d: ", end="", flush=True)
    raise UsageError("the input ended before an answer")


def slide(question: dict) -> str:
    """A slide in Marp's Markdown; what each answer shows is in its notes."""
    answers = lettered(question)
    choices = "\n".join(f"- **{letter}** {answer['text']}" for letter, answer in answers.items())
    notes = "\n".join(f"{letter}: {verdict(answer)}" for letter, answer in answers.items())
    return f"### {question['question']}\n\n{choices}\n\n<!--\n{notes}\n-->"


def slides() -> str:
    """The slides of the day; a line `<!-- questions: PAGE -->` becomes the slides of that page."""

    def page_slides(marker: re.Match) -> str:
        return "\n\n".join(f"---\n\n{slide(question)}" for question in PAGES[marker[1]])

    text = (ROOT / "slides/slides.md").read_text(encoding="utf-8")
    return re.sub(r"<!-- questions: (\S+) -->", page_slides, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", default=".", help="a page that has questions")
    parser.add_argument("--slides", action="store_true", help="print the slides of the day")
    arguments = parse(parser)
    if arguments.slides:
        print(slides())
        return
    page = Path(os.path.relpath(arguments.page, ROOT)).as_posix()
    if page not in PAGES:
        raise UsageError(f"there are no questions on {page}; there are on {', '.join(PAGES)}")
    right = sum(ask(question) for question in PAGES[page])
    print(f"\n{right} of {len(PAGES[page])} at the first attempt")


if __name__ == "__main__":
    sys.exit(exit_code(main))

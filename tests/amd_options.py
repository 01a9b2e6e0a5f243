"""Parsers of the command lines of AMD's profilers, by ROCm release, made of the facts in fixtures/amd_options.json."""

import argparse
import json
from pathlib import Path
from typing import Any

FACTS = json.loads((Path(__file__).resolve().parent / "fixtures/amd_options.json").read_text())


def order(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


TAKES: dict[str, dict[str, Any]] = {"0": {"action": "store_true"}, "1": {}} | {nargs: {"nargs": nargs} for nargs in "?+*"}


class Parser(argparse.ArgumentParser):
    """It refuses, with exit code 2, what the tool of that release does not have. Options that are not given are no attributes."""

    def __init__(self, tool: str, release: str) -> None:
        super().__init__(tool, allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
        facts = FACTS[tool]
        gone = {name for at, names in facts["until"].items() if order(at) <= order(release) for name in names.split()}
        here = [by_values for at, by_values in facts["since"].items() if order(at) <= order(release)]
        for values, options in (row for by_values in here for row in by_values.items()):
            for names in (option.split("/") for option in options.split()):
                if names[-1] not in gone:
                    self.add_argument(*names, **TAKES[values])
        self.conflicts = facts.get("conflicts", {})

    def parse_known_args(self, args: list[str], namespace: None = None) -> tuple[argparse.Namespace, list[str]]:
        for option, others in self.conflicts.items():
            if option in args and {*others.split()} & {*args}:
                self.error(f"{option} can't be given with {others}")
        return super().parse_known_args(args, namespace)

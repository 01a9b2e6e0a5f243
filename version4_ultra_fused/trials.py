"""Changes under trial, each by its name in V4_TRIALS (comma-separated), numbers by V4_NAME."""

import os

ON = frozenset(filter(None, os.environ.get("V4_TRIALS", "").split(",")))


def numbers(name: str, *default: int) -> tuple[int, ...]:
    """The integers of V4_NAME, comma-separated."""
    said = os.environ.get(f"V4_{name}")
    return tuple(map(int, said.split(","))) if said else default

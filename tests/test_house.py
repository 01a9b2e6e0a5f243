"""Rules of the repository that no single module can check."""

import ast
import collections
import difflib
import functools
import graphlib
import re
from collections.abc import Collection
from pathlib import Path

from tests.conftest import ROOT

import pytest

VERSIONS = sorted(ROOT.glob("version*_*/tiny_llama_v*.py"))
CHANGED_LINES = (100, 168, 250)  # at most, from each version to the next
FIRST_FILE_LINES, FILE_LINES = 269, 301


def lines(path: Path) -> list[str]:
    """The lines that are not blank."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@pytest.mark.parametrize("number, most", list(enumerate(CHANGED_LINES)))
def test_the_diff_of_two_versions_is_short(number, most):
    before, after = VERSIONS[number : number + 2]
    changed = [
        line for line in difflib.unified_diff(lines(before), lines(after), n=0) if line[0] in "+-"
    ][2:]
    assert len(changed) <= most, f"{len(changed)} lines were added or removed"


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_a_version_is_read_in_one_go(path):
    most = FIRST_FILE_LINES if path == VERSIONS[0] else FILE_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_every_version_has_its_loop_in_sight_and_the_same(path):
    """`train` and `main` are the same in all, but for the version's name, switches, and what it
    supports.
    """
    text = path.read_text(encoding="utf-8")
    own = re.compile(r'"v\d"|, captured=CAPTURED, forms=PARALLEL|, SWITCHES')
    train = text[text.index("def train(") : text.index("def main(")]
    first = VERSIONS[0].read_text(encoding="utf-8")
    assert own.sub("", train) == own.sub(
        "", first[first.index("def train(") : first.index("def main(")]
    )
    assert "for number in run.steps():" in train and "cli.command(main)" in text


# --------------------------------------------------------------------------------------------------- who may use whom

ROOM_LIMIT = 18  # modules in a room; a view has a file, and a command has a view
VIEW_LIMIT = 26
HOUSES = ("tracepage", "common", "studies", "documents")  # each uses those before it
# its rooms; each uses those before it
TRACEPAGE = ("", "records", "cost", "readers", "causes", "show", "views")
VERSION_NAME = re.compile(r"(tiny_llama_)?v[1-9]|version[1-9]\w*")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> set[str]:
    """The full names that a file imports, at its top or inside a function: `from a import b` gives
    a.b.
    """
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(folder: Path) -> dict[str, Path]:
    """The modules below a folder by their full names; a link is not followed."""
    paths = [path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


MODULES = {name: path for house in HOUSES for name, path in modules(ROOT / house).items()}
COMMON = {name: path for name, path in MODULES.items() if name.startswith("common.")}


def uses(path: Path, modules: Collection[str] = MODULES) -> set[str]:
    """Those of the modules that a file imports."""
    return {
        ours for ours in modules if any(f"{name}.".startswith(f"{ours}.") for name in imports(path))
    }


USES = {name: uses(path) for name, path in MODULES.items()}


def room(name: str) -> tuple[str, str]:
    """House and room of a module: "common.cli" gives ("common", ""), "common.training.run" gives
    ("common", "training").
    """
    house, *rooms, _ = name.split(".")
    return house, ".".join(rooms)


def test_a_room_is_small_and_no_two_modules_have_one_name():
    names = [path.name for path in MODULES.values() if path.name != "__main__.py"]
    assert sorted(names) == sorted(set(names))

    counts = collections.Counter(path.parent.relative_to(ROOT) for path in MODULES.values())
    assert {
        str(folder): count
        for folder, count in counts.items()
        if count > (VIEW_LIMIT if folder.name == "views" else ROOM_LIMIT)
        and folder.name != "common"
    } == {}


def test_imports_run_in_no_circle():
    ours = COMMON | {
        name: path for version in VERSIONS for name, path in modules(version.parent).items()
    }
    try:
        tuple(
            graphlib.TopologicalSorter(
                {name: uses(path, ours) for name, path in ours.items()}
            ).static_order()
        )
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_house_uses_only_the_houses_and_rooms_below_it():
    wrong = []
    for name, used in USES.items():
        house, own = room(name)
        for other in used:
            other_house, other_room = room(other)
            above = HOUSES.index(other_house) > HOUSES.index(house)
            if house == other_house == "tracepage":
                above = TRACEPAGE.index(other_room) > TRACEPAGE.index(own) and other_room != own
            if house == other_house == "common":
                above = other_room == "training" and own != "training"
            if above and name != "tracepage.page":
                wrong.append(f"{name} uses {other}")
    assert wrong == []


def test_tracepage_stands_alone_and_needs_no_torch():
    """Whoever installs it has neither PyTorch nor the rest of the workshop."""
    foreign = {"torch", "triton", "jax", *HOUSES[1:], "exercise_tools"}
    wrong = [
        f"{name} imports {imported}"
        for name, path in MODULES.items()
        if name.startswith("tracepage.")
        for imported in imports(path)
        if imported.split(".")[0] in foreign
    ]
    assert wrong == []


def test_common_knows_no_version_by_name():
    """It imports no version's folder, and no string in it is the name of a version."""
    wrong = []
    for name, path in COMMON.items():
        wrong += [
            f"{name} imports {imported}"
            for imported in imports(path)
            if imported.startswith("version")
        ]
        constants = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)}
        wrong += [
            f"{name} holds {text!r}"
            for text in constants
            if isinstance(text, str) and VERSION_NAME.fullmatch(text)
        ]
    assert wrong == []


@pytest.mark.parametrize(
    "folder", [path.parent for path in VERSIONS], ids=lambda folder: folder.name
)
def test_a_version_uses_common_and_its_own_folder(folder):
    """And the kernels of the versions before it."""
    folders = [path.parent for path in VERSIONS]
    allowed = (
        folder.name,
        *(f"{earlier.name}.kernels" for earlier in folders[: folders.index(folder)]),
    )
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules(folder).items()
        for imported in imports(path)
        if imported.startswith(("version", "tests"))
        and not f"{imported}.".startswith(tuple(f"{name}." for name in allowed))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "folder", [path.parent for path in VERSIONS[2:]], ids=lambda folder: folder.name
)
def test_kernels_know_nothing_of_their_version_but_kernels(folder):
    """Neither the model nor its memory plan."""
    found = {
        imported for path in modules(folder / "kernels").values() for imported in imports(path)
    }
    assert [
        name
        for name in found
        if name.startswith(folder.name) and ".kernels" not in name and name.count(".") > 1
    ] == []


# -------------------------------------------------------------------------------------------------------------- tests

TESTS = modules(ROOT / "tests")


def test_the_tests_mirror_the_source():
    houses = tuple(f"tests.{house}." for house in HOUSES)
    tested = [name for name in TESTS if name.startswith(houses) and ".test_" in name]
    expected = {name.removeprefix("tests.").replace(".test_", ".") for name in tested}
    assert expected <= MODULES.keys(), expected - MODULES.keys()


def test_a_test_imports_no_other_test_and_leaves_the_search_path_alone():
    edits = re.compile(
        r"""sys\.path\s*(\[|\.(insert|append|extend)|\+?=[^=])|syspath_prepend|setattr\(sys, "path", (?!\[\*sys\.path\]\))"""
    )
    # The first two name them, and the third sets the path of a new process.
    wrong, free = [], ("test_house", "test_start", "processes")
    for name, path in TESTS.items():
        wrong += [
            f"{name} imports {found}"
            for found in imports(path)
            if ".test_" in f".{found}" and found.startswith("tests")
        ]
        wrong += [
            f"{name} edits sys.path"
            for _ in edits.finditer(path.read_text(encoding="utf-8"))
            if path.stem not in free
        ]
    assert wrong == []

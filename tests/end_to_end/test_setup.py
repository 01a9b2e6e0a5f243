"""Set-up keeps the torch and triton that are installed, pins everything else, and refuses in one line what cannot work.

Each test runs the real setup.sh or Makefile in a small clone, on a machine whose PATH holds only what the test puts there.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests.conftest import ROOT, finished

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PARTS = ("Makefile", "setup.sh", "pyproject.toml", "constraints.txt", ".ci/run")
TOOLS = ("awk", "bash", "cat", "dirname", "make", "sed", "sh", "uname")
EXTRAS = ("deepspeed-needs", "test", "lint")  # as in setup.sh, which adds "triton" where the torch that it installs brings none
# A Python whose environments have, in place of pip, a module that notes what it is asked for.
QUICK_PYTHON = """
[ "$2" = venv ] || exec '{python}' "$@"
'{python}' -m venv --without-pip --clear .venv
echo "import sys; print(*sys.argv[1:], file=open('pip.log', 'a'))" >"$(echo .venv/lib/python3*/site-packages)/pip.py"
"""


class Clone:
    """A copy of the set-up files in a folder with a space in its name, and the environment to run them in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.path = folder / "a clone", folder / "bin", folder / "path"
        for part in PARTS:
            (self.folder / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, self.folder / part)
        self.bin.mkdir()
        self.path.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "TORCH"))}
        self.environment |= {"PATH": str(self.bin), "PYTHON": sys.executable, "PYTHONPATH": str(self.path)}

    def tool(self, name: str, script: str = "true") -> None:
        """Puts a command on PATH."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def python(self, file: str, source: str) -> None:
        """Puts a module on PYTHONPATH."""
        (self.path / file).parent.mkdir(parents=True, exist_ok=True)
        (self.path / file).write_text(source)

    def without_torch(self, answers: bool = False) -> None:
        """Makes Python one that has no torch, and for which PyTorch's index answers or not."""
        opened = "None" if answers else "exec('raise OSError')"
        self.python(
            "sitecustomize.py",
            f"import sys, urllib.request\nsys.modules['torch'] = None\nurllib.request.urlopen = lambda *_, **__: {opened}\n",
        )

    def asked_of_pip(self, **environment: str) -> list[str]:
        """What a whole set-up asks pip to install, in the order of its calls; nothing is installed."""
        self.tool("quick-python", QUICK_PYTHON.format(python=sys.executable))
        self.said = self.run("sh", "setup.sh", PYTHON="quick-python", **environment).stdout
        return [line for line in (self.folder / "pip.log").read_text().splitlines() if line.startswith("install ")]

    def run(self, *command: str, check: int = 0, **environment: str) -> subprocess.CompletedProcess:
        return finished(command, self.folder, self.environment | environment, check)

    def plan(self, **environment: str) -> str:
        done = self.run("sh", "setup.sh", "--plan", **environment)
        assert not (self.folder / ".venv").exists()
        return done.stdout.partition(", ")[2].strip()

    def refusal(self, **environment: str) -> str:
        done = self.run("sh", "setup.sh", check=2, **environment)
        assert not done.stdout and not (self.folder / ".venv").exists()
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        return done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


# Which interpreter


@pytest.mark.parametrize("module, source, message", [
    ("", "", "no-such-python does not run: install Python 3.10 or newer"),
    ("sitecustomize", "import sys\nsys.version_info = (3, 9, 18)\n", "is Python 3.9, and 3.10 or newer is needed: name one"),
    ("ensurepip", "raise ImportError", "venv package (Debian and Ubuntu: apt-get install python{0.major}.{0.minor}-venv)"),
    (
        "torch/__init__", "raise ImportError('libamdhip64.so.7: cannot open')",
        "torch/__init__.py does not import (libamdhip64.so.7: cannot open): repair that torch, or take it off the path",
    ),
], ids=["missing", "old", "without ensurepip", "with a torch that does not import"])  # fmt: skip
def test_a_python_that_cannot_be_used_is_refused(clone, module, source, message):
    if module:
        clone.python(f"{module}.py", source)
    assert message.format(sys.version_info) in clone.refusal(**({} if module else {"PYTHON": "no-such-python"}))


def test_active_environment_that_has_to_be_remade_is_refused(clone):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone.folder / ".venv"], check=True)
    done = clone.run("sh", "setup.sh", check=2, PYTHON=str(clone.folder / ".venv/bin/python"))
    assert "run 'deactivate' first" in done.stderr
    assert (clone.folder / ".venv/pyvenv.cfg").exists()


@pytest.mark.parametrize("folder, said", [
    ("shared", "is a link"), ("a clone/.venv", "is not of setup.sh, which would erase it: move it away, or remove it"),
], ids=["behind a link", "of another maker"])  # fmt: skip
def test_an_environment_that_set_up_has_not_made_is_not_erased(clone, folder, said):
    place = clone.folder.parent / folder
    place.mkdir()
    (place / "pyvenv.cfg").write_text("home = /elsewhere\n")
    if folder == "shared":
        (clone.folder / ".venv").symlink_to(place)
    done = clone.run("sh", "setup.sh", check=2)
    assert done.stderr.startswith(f"error: .venv {said}") and done.stderr.count("\n") == 1
    assert [path.read_text() for path in place.iterdir()] == ["home = /elsewhere\n"]


# Which torch


@pytest.mark.parametrize("registered", (False, True), ids=("without dist-info", "with dist-info"))
def test_importable_torch_is_kept(clone, registered):
    clone.python("torch/__init__.py", "__version__ = '2.12.0+rocm7.1'")
    if registered:
        clone.python("torch-2.12.0+rocm7.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0+rocm7.1\n")
    assert clone.plan() == f"keeps torch 2.12.0+rocm7.1 of {clone.path}"
    clone.tool("nvidia-smi")
    assert clone.plan(TORCH_BUILD="cu126") == f"keeps torch 2.12.0+rocm7.1 of {clone.path}"


@pytest.mark.parametrize("version, warned", [
    ("2.1.0+cu118", True), ("2.10.0", True), ("2.11.0a0+git1234567", False), ("2.12.0+rocm7.1", False), ("3.0", False),
])  # fmt: skip
def test_an_old_torch_is_kept_with_a_warning(clone, version, warned):
    """Of the oldest that pyproject.toml allows."""
    clone.python("torch/__init__.py", f"__version__ = '{version}'")
    done = clone.run("sh", "setup.sh", "--plan")
    assert f"keeps torch {version} of " in done.stdout
    expected = f"warning: torch {version} is kept, but torch 2.11 or newer is needed: load or install a newer one before set-up\n"
    assert done.stderr == expected * warned


def test_amd_gpu_without_torch_is_refused(clone):
    clone.without_torch()
    clone.tool("rocminfo")
    message = clone.refusal()
    assert "load a module that has it, install a ROCm build, or pass TORCH_BUILD=rocmX.Y or cpu" in message


def test_an_argument_that_there_is_not_changes_nothing(clone):
    done = clone.run("sh", "setup.sh", "--paln", check=2)
    assert done.stderr == "error: setup.sh takes --plan or nothing, not --paln\n" and not (clone.folder / ".venv").exists()


@pytest.mark.parametrize("tool, build, answers, plan", [
    ("rocminfo", "rocm7.2", False, "2.13.0+rocm7.2"),
    ("nvidia-smi", "", True, "2.13.0 for NVIDIA GPUs"),
    ("", "", True, "2.13.0 for the CPU"),
    ("", "", False, "2.13.0 (PyTorch's CPU index does not answer, so what pip finds)"),
])  # fmt: skip
def test_the_build_that_is_installed(clone, tool, build, answers, plan):
    clone.without_torch(answers)
    if tool:
        clone.tool(tool)
    elif sys.platform != "linux" or Path("/dev/kfd").exists():
        pytest.skip("PyPI has CUDA builds for Linux only; here is an AMD GPU, or no Linux")
    assert clone.plan(TORCH_BUILD=build) == f"installs torch {plan}"


@pytest.mark.parametrize("torch, triton, first, extras", [
    (False, False, "torch==2.13.0+cpu", ",triton"), (False, True, "torch==2.13.0+cpu", ""), (True, False, "", ""),
], ids=["without triton", "with triton", "kept"])  # fmt: skip
def test_triton_is_installed_only_beside_a_torch_that_is_installed_and_brings_none(clone, torch, triton, first, extras):
    clone.python("torch/__init__.py", "__version__ = '2.13.0+cpu'") if torch else clone.without_torch()
    if triton:
        clone.python("triton/__init__.py", "")
    *installed, packages, _ = clone.asked_of_pip(TORCH_BUILD="cpu")
    assert [line.endswith(first) for line in installed] == [True] * bool(first)
    _, *phases, _ = clone.said.splitlines()
    assert [phase.split()[1] for phase in phases] == ["downloads"] * (not torch) + ["installs", "builds", "imports"]
    assert max(map(len, phases)) <= 100 and f", {150 if torch or triton else 350} MB," in phases[-3]
    pins = ".venv/kept.txt" if torch else "constraints.txt"
    assert packages == f"install --constraint {pins} --quiet --editable .[{','.join(EXTRAS)}{extras}]"


# What is left behind


def test_failed_install_leaves_an_empty_stamp_and_kept_torch_comes_last(clone):
    clone.python("torch/__init__.py", "__version__ = '2.12.0'")
    clone.python("numpy/__init__.py", "__version__ = '1.26.4'")
    clone.python("pip/__init__.py", "raise ImportError('an old pip beside the torch')")
    done = clone.run("make", "setup", check=2, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert "keeps torch 2.12.0" in done.stdout and "No matching distribution found for setuptools" in done.stderr
    assert "error: pip could not install this, as its lines above say: without a network see" in done.stderr
    assert (clone.folder / ".venv/set-up").read_text() == ""
    assert "sh setup.sh" in clone.run("make", "-n", "setup").stdout

    # The environment sees the kept folder whether it is on PYTHONPATH or not, and its own packages win.
    where = "import numpy, pip, torch; print(numpy.__file__, torch.__file__, pip.__file__, sep='\\n')"
    for path in (str(clone.path), ""):
        numpy, torch, pip = clone.run(".venv/bin/python", "-c", where, PYTHONPATH=path).stdout.split("\n")[:3]
        assert numpy == str(clone.path / "numpy/__init__.py")
        assert torch == str(clone.path / "torch/__init__.py")
        assert Path(pip).is_relative_to(clone.folder / ".venv")
    assert (clone.folder / ".venv/kept.txt").read_text().split() == ["torch<0", "triton<0", "numpy==1.26.4"]


@pytest.mark.slow
def test_whole_set_up_keeps_torch(clone):
    """Downloads everything but torch (a minute or two)."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    clone.environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    clone.environment |= {"PYTHON": str(base), "PYTHONPATH": str(clone.path)}
    shutil.copytree(ROOT / "common", clone.folder / "common")
    clone.python("torch/__init__.py", "__version__ = '2.12.0+rocm7.1'")
    before = sorted(clone.path.rglob("*"))
    clone.run("make", "setup")
    assert [path for path in sorted(clone.path.rglob("*")) if "__pycache__" not in path.parts] == before
    assert not list(clone.folder.glob(".venv/lib/python*/site-packages/torch*")), "a second torch"
    assert not list(clone.folder.glob(".venv/lib/python*/site-packages/triton*"))

    code = (
        "import common, pandas, pydantic, pytest, tensorboard, tokenizers, torch, transformers\n"
        "from importlib import metadata\n"
        "metadata.version('deepspeed')\n"
        "print(torch.__version__, common.__path__[0])"
    )
    seen = clone.run(str(clone.folder / ".venv/bin/python"), "-c", code, PYTHONPATH="").stdout
    assert seen == f"2.12.0+rocm7.1 {clone.folder / 'common'}\n"
    assert "Nothing to be done" in clone.run("make", "setup").stdout


# Makefile and .ci/run


def set_up(clone: Clone, python: str = "true", folder: Path | None = None) -> None:
    """What a set-up in a folder leaves, that of the clone if none is given; `python` is the shell of its Python."""
    (clone.folder / ".venv/bin").mkdir(parents=True)
    clone.tool("stand-in", python)
    (clone.folder / ".venv/bin/python").symlink_to(clone.bin / "stand-in")
    (clone.folder / ".venv/set-up").write_text(f"{folder or clone.folder.resolve()}\n")


def test_plain_make_lists_every_target(clone):
    listed = re.findall(r"^make ([a-z-]+) +\S", clone.run("make").stdout, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)", (clone.folder / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(listed) == sorted(phony)
    assert max(map(len, clone.run("make").stdout.splitlines())) <= 100


@pytest.mark.parametrize("target, name, value, expected", [
    ("compare", "STEPS", "1; ls", "'--num-steps', '1; ls']"),
    ("compare", "PRESET", "a b", "'--preset', 'a b', "),
    ("compare", "FASTEST", "v 4", "'--fastest', 'v 4', "),
    ("preflight", "JSON", "a b.json", "'--json', 'a b.json']"),
    ("page", "RUN", "a b.json", "['page.py', 'a b.json']"),
])  # fmt: skip
def test_a_value_given_to_make_is_one_argument(clone, target, name, value, expected):
    """On a machine without a GPU: its Python, which is a stand-in, says so by its exit code."""
    set_up(clone, f"""[ "$1" != -c ] || exit 1\nexec '{sys.executable}' -c 'import sys; print(sys.argv[1:])' "$@" """)
    assert expected in clone.run("make", target, f"{name}={value}").stdout


def test_set_up_is_done_once(clone):
    set_up(clone)
    assert "Nothing to be done" in clone.run("make", "setup").stdout
    commands = clone.run("make", "-n", "train").stdout
    assert commands == "cd version1_pytorch_baseline && ../.venv/bin/python tiny_llama_v1.py\n"


@pytest.mark.parametrize("pins", ["constraints.txt", ".venv/kept.txt"])
def test_jax_comes_without_another_torch(clone, pins):
    set_up(clone, 'echo "$@"')
    if not (clone.folder / pins).exists():  # one that is newer than the stamp would be set up again
        (clone.folder / pins).touch()
    asked = clone.run("make", "--silent", "setup-jax").stdout
    assert asked == f"-m pip install --constraint {pins} --editable .[jax]\n"


@pytest.mark.parametrize("gpu, settings, preset, more", (
    (False, (), "tiny", "--num-steps 3"),
    (True, ("PRESET=small", "STEPS=9", "FASTEST=v4"), "small", "--fastest v4 --use-amp --num-steps 9"),
), ids=("cpu", "gpu"))  # fmt: skip
def test_a_comparison_is_in_mixed_precision_where_there_is_a_gpu(clone, gpu, settings, preset, more):
    set_up(clone, f'[ "$1" != -c ] || exit {int(not gpu)}\necho "$@"')
    said = clone.run("make", "compare", *settings).stdout
    shape = f"--preset {preset} --batch-sizes preset --seq-lengths preset --output-dir comparison/{preset}"
    assert said == f"version2_pytorch_fused/benchmark_suite.py --models available {shape} {more}\n"


@pytest.mark.parametrize("changed", ("pyproject.toml", "constraints.txt", "setup.sh", "the folder"))
def test_set_up_is_done_again_when_its_files_or_its_folder_change(clone, changed):
    moved = changed == "the folder"
    set_up(clone, folder=Path("/somewhere/else") if moved else None)
    if not moved:
        stamp = (clone.folder / ".venv/set-up").stat().st_mtime
        os.utime(clone.folder / changed, (stamp + 10, stamp + 10))
    assert clone.run("make", "-n", "test").stdout.startswith("sh setup.sh\n")


@pytest.mark.parametrize(("here", "root", "environment", "browser"), [
    ("chromium", 1, {}, True), ("google-chrome", 1, {}, True),
    ("", 0, {"CI": "true"}, True), ("", 1, {"CI": "true"}, False), ("", 0, {"CI": ""}, False),
], ids=["chromium", "chrome", "root of a CI", "no root", "no CI"])  # fmt: skip
def test_ci_checks_style_types_tests_and_pages_in_the_clone(clone, here, root, environment, browser):
    """It installs chromium where it may, and says so where the pages were not opened."""
    clone.tool("make", 'pwd\necho "make $*"')
    clone.tool("id", f"echo {root}")
    clone.tool("apt-get", f"[ $1 = update ] || ln -s make '{clone.bin}/chromium'")
    (clone.bin / "ln").symlink_to(shutil.which("ln"))
    if here:
        clone.tool(here)
    ran, folder = clone.run("bash", ".ci/run", **environment), clone.folder.resolve()
    assert ran.stdout == f"{folder}\nmake lint types test\n" + f"{folder}\nmake test-browser\n" * browser
    assert ("THE TESTS IN A BROWSER DID NOT RUN" in ran.stderr) != browser and os.access(ROOT / ".ci/run", os.X_OK)


# What is asked of pip


def project(table: str = "project") -> dict:
    """A table of pyproject.toml."""
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())[table]


def asked_for(*more: str) -> dict[str, list[Requirement]]:
    """All that set-up asks pip for and `more`, by package, with what that requires in turn, as installed here."""
    asked = list(project()["dependencies"])
    for extra in EXTRAS:
        asked += project()["optional-dependencies"][extra]
    waiting = [Requirement(text) for text in [*asked, *more]]
    found: dict[str, list[Requirement]] = {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement not in found.setdefault(name, []):
            found[name].append(requirement)
            for text in metadata.requires(name) or ():
                child = Requirement(text)
                if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in requirement.extras | {""}):
                    waiting.append(child)
    return found


def pins() -> dict[str, Version]:
    """constraints.txt, as it is for this interpreter."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    chosen = [pin for pin in requirements if pin.marker is None or pin.marker.evaluate()]
    versions = {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in chosen}
    assert len(versions) == len(chosen), "a package is pinned twice"
    return versions


def test_nothing_asked_for_requires_torch_or_triton_and_all_else_that_deepspeed_needs_is_named():
    assert not {"torch", "triton", "deepspeed", "accelerate"} & asked_for().keys()

    needs = {canonicalize_name(Requirement(text).name) for text in metadata.requires("deepspeed") if "extra ==" not in text}
    assert needs - asked_for().keys() == {"torch"}


def test_the_extra_of_all_and_what_uv_installs_are_whole():
    def named(texts: list[str]) -> set[str]:
        own, others = set(), set()
        for requirement in map(Requirement, texts):
            if requirement.name == project()["name"]:
                own |= named([text for extra in requirement.extras for text in project()["optional-dependencies"][extra]])
            else:
                others.add(requirement.name)
        return own | others

    extras = named(project()["optional-dependencies"]["all"])
    assert {"torch", "triton", "deepspeed", "pytest"} <= extras
    assert {"matplotlib", "pandas", "tensorboard"} <= named(project()["dependencies"])
    assert extras - named(project("dependency-groups")["dev"]) == {"deepspeed"}


def test_triton_is_the_one_that_this_torch_goes_with():
    """And there are wheels of it for Linux alone."""
    (extra,) = map(Requirement, project()["optional-dependencies"]["triton"])
    assert extra.specifier.contains(pins()["triton"])
    machine = {"sys_platform": "linux", "platform_machine": "x86_64"}
    assert extra.marker.evaluate(machine) and extra.marker.evaluate(machine | {"platform_machine": "aarch64"})
    assert not extra.marker.evaluate(machine | {"platform_machine": "riscv64"})
    assert not extra.marker.evaluate({"sys_platform": "darwin", "platform_machine": "x86_64"})
    wanted = [Requirement(text) for text in metadata.requires("torch") or () if text.startswith("triton")]
    if Version(metadata.version("torch")).public == str(pins()["torch"]):  # a build for a GPU says which triton it wants
        assert all(requirement.specifier.contains(pins()["triton"]) for requirement in wanted)


def pinned_environment() -> bool:
    return Path(sys.prefix, "set-up").exists() and not Path(sys.prefix, "kept.txt").exists()


@pytest.mark.skipif(not pinned_environment(), reason="not an environment of pinned versions: torch was kept, or set-up not used")
def test_everything_is_installed_as_pinned():
    versions = pins()
    installed = set(metadata.packages_distributions().get("triton", ()))
    # Builds for GPUs bring libraries that torch itself pins, and ROCm's a triton of another name.
    brought = ("nvidia-", "cuda-", "triton-")
    asked = {name: by for name, by in asked_for("torch", *installed & {"triton"}).items() if not name.startswith(brought)}
    assert asked.keys() | {"deepspeed"} <= versions.keys()
    for name in asked:
        assert Version(metadata.version(name)).public == str(versions[name]), name
        for requirement in asked[name]:
            assert requirement.specifier.contains(versions[name], prereleases=True), f"{requirement} is not met by its pin"

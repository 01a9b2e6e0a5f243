"""Tables for the instructor: all commands, all problems with their minutes, and the numbers that the problems ask for.

A command is a Python script with `if __name__ == "__main__"`, a shell script that begins with `#!`, a target of the Makefile with
a comment `## ...`, or a module of common whose docstring says that `python -m` runs it. A problem is a heading of an exercise
page with a line of minutes below it (`MINUTES`).
"""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from common import ROOT
from common.analysis.output import run_facts, tables
from common.analysis.profiles import chrome_trace
from common.documents import result_tables
from common.errors import UsageError
from common.records import step_profile
from common.records.run_record import TimedRun

import pandas

# That have scripts, beside the root itself. What a script writes lies in folders below, such as handouts.
FOLDERS = ("results", "slurm", "version*_*", "version*_*/exercises", "version*_*/exercises/*")
SHELLS = {".sh": "bash", ".sbatch": "sbatch"}
TITLE = re.compile(r"(?:Problem|Part) (?:(\d+|\w)\b)?(?: ?\(([\w ]+)\))?(?:: (.*))?")
MINUTES = re.compile(r"\*(\d+) min on a laptop, (\d+) min on a GPU\. (Must|Optional)\. (After [^*]+|Needs nothing before)\.\*")
RUN_ROWS = (
    "B x S", "ms/step", "p20 to p80", "tokens/s", "peak memory", "loss of a uniform guess", "loss", "last loss", "forward ms",
    "backward ms", "optimizer ms", "TFLOP/s", "MFU %", "% of measured GEMM",
)  # fmt: skip


class Command(NamedTuple):
    folder: Path
    line: str
    purpose: str


def first_sentence(text: str) -> str:
    """Of the first paragraph, up to a full stop, question mark or exclamation mark with a space after it."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.sub(":$", ".", re.split(r"(?<=[.?!]) ", paragraph)[0])


def _python(path: Path) -> Command | None:
    """Of a file that `python FILE` or `python -m MODULE` runs; a module of common counts if its docstring says so."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text, parts = ast.get_docstring(tree) or "", path.relative_to(ROOT).with_suffix("").parts
    folder, line = path.parent, f"python {path.name}"
    found = any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body)
    if parts[0] == "common":
        folder, line = ROOT, f"python -m {'.'.join(part for part in parts if part != '__main__')}"
        found = parts[-1] == "__main__" or (found and bool(re.search(rf"{re.escape(line)}\b", text)))
    return Command(folder, line, first_sentence(text)) if found else None


def _shell(path: Path) -> Command | None:
    """Of a file that begins with `#!`; its purpose is the comment below that line. A file that others source has no such line."""
    found = re.match(r"#!.*\n((?:#.*\n)+)", path.read_text(encoding="utf-8"))
    return found and Command(
        path.parent, f"{SHELLS[path.suffix]} {path.name}", first_sentence(re.sub("^# ?", "", found[1], flags=re.MULTILINE))
    )


def scripts() -> list[Path]:
    """The Python and shell files that may be commands, folder by folder."""
    folders = [folder for pattern in FOLDERS for folder in sorted(ROOT.glob(pattern)) if folder.name != "common"]
    found = [
        *ROOT.glob("*.py"),
        ROOT / "setup.sh",
        *sorted((ROOT / "common").rglob("*.py")),
        *(path for each in folders for path in sorted(each.glob("*"))),
    ]
    return [path for path in found if path.suffix in (".py", *SHELLS)]


def all_commands() -> list[Command]:
    """The targets of the Makefile, the commands of the root, then those of each folder."""
    named = re.findall(r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = [Command(ROOT, f"make {name}", f"{purpose[0].upper()}{purpose[1:]}.") for name, purpose in named]
    found = [_python(path) if path.suffix == ".py" else _shell(path) for path in scripts()]
    return sorted(filter(None, targets + found), key=lambda command: command.folder)


def commands() -> str:
    """A list for each folder: a command, with the first sentence of its docstring or its opening comment.

    A script whose name a version before has too is only named.
    """
    parts: list[str] = []
    known: set[str] = set()
    for folder, group in groupby(all_commands(), lambda command: command.folder):
        found = list(group)
        again = [f"`{command.line}`" for command in found if command.line in known]
        lines = [f"- `{command.line}`: {command.purpose}" for command in found if command.line not in known]
        lines += [f"- as in a version before: {', '.join(again)}"] * bool(again)
        known |= {command.line for command in found}
        name = "In the root of the repository" if folder == ROOT else f"In `{folder.relative_to(ROOT).as_posix()}/`"
        parts.append("\n".join([f"{name}:", "", *lines, ""]))
    return "\n".join(parts)


class Problem(NamedTuple):
    page: Path
    number: str  # may be empty
    name: str  # in brackets in the heading, otherwise the number
    title: str  # may be empty
    anchor: str
    laptop: int  # minutes
    gpu: int
    must: bool
    after: str


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading: lower case, without punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def pages() -> list[Path]:
    """The exercise pages of all versions, in order."""
    return sorted(ROOT.glob("version*_*/exercises/**/*.md"))


def headings(page: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Each heading of a problem, as `TITLE` matches it, and the text up to the next heading; code blocks hold no headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)[1:]
    for line, below in zip(parts[::2], parts[1::2], strict=True):
        if (heading := re.match(r"##+ +(.*)$", line)) and (title := TITLE.match(heading[1])):
            yield title, below.strip()


def problems() -> list[Problem]:
    """The problems of all pages that have some. UsageError: one has no line of minutes, but others on its page have one."""
    found = []
    for page in pages():
        lines = [(heading, MINUTES.match(" ".join(below.split()))) for heading, below in headings(page)]
        for heading, minutes in lines if any(minutes for _, minutes in lines) else ():
            if not minutes:
                where = f"{page.relative_to(ROOT)}: {heading.string}"
                raise UsageError(f"{where}: no line such as *10 min on a laptop, 8 min on a GPU. ...")
            number, name, title = heading.groups()
            laptop, gpu, kind, after = minutes.groups()
            known = (int(laptop), int(gpu), kind == "Must", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", after))  # links as text
            found.append(Problem(page, number or "", name or number, title or "", anchor(heading.string), *known))
    return found


def all_problems() -> str:
    """A row per page with its problems and their minutes on a laptop: those that are a must, then the optional ones."""
    rows = []
    for page, group in groupby(problems(), lambda problem: problem.page):
        link, found = page.relative_to(ROOT).as_posix(), list(group)
        heading = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
        must, optional = (
            ", ".join(f"[({each.name})]({link}#{each.anchor}) {each.laptop}" for each in found if each.must is kind)
            for kind in (True, False)
        )
        rows.append([f"[Version {link[len('version')]}, {heading[2:]}]({link})", must, optional])
    return tables.markdown(["page", "must", "optional"], rows)


def answers(folder: Path) -> str:
    """The answer sheet of a device: Version 1's runs, and kernels of the traces. UsageError: the folder has none of these."""
    parts = [part for part in (_first_version(folder), _traces(folder)) if part]
    if not parts:
        raise UsageError(f"{folder} holds no run and no trace")
    return "\n".join(parts)


def _first_version(folder: Path) -> str | None:
    """A column per preset: all that exercises 1 to 3 of Version 1 ask of a run."""
    if not any(folder.glob("v[0-9]_*_profile.json.gz")):
        return None
    runs = list(result_tables.baseline_runs(folder))
    columns, run = {run["training"]["preset"]: _run_rows(run, profile) for run, profile in runs}, runs[0][0]
    head = f"Runs of {run_facts.device(run)} in {run['precision']['compute']}; torch {run['environment']['torch']}"
    return f"{head}\n\n{_columns(result_tables.label(run), columns)}"


def _run_rows(run: TimedRun, path: Path) -> dict[str, object]:
    profile, shown = step_profile.read(path), run_facts.columns(run)
    spans = {name: sum(phases.values()) for name, phases in step_profile.span_milliseconds(profile).items()}
    rows = {name: shown[name] for name in RUN_ROWS} | {
        "launches a step": profile["launch"]["count"] / profile["profiled_steps"] or None,
        "GPU idle under the profiler, %": step_profile.idle_percent(profile),
    }
    kind = "kernels" if profile["kernels"] else "operators"
    rows |= {f"{name}: {kind}, ms": spans[name] for name in ("attention", "mlp", "norm", "loss", "optimizer")}
    return {name: value for name, value in rows.items() if value is not None}


def _traces(folder: Path) -> str | None:
    """A column per trace: kernels of a step, and their time by span. Kernels of a captured or compiled step are in no span."""
    columns = {}
    for path in sorted(folder.glob("traces/*.json.gz")):
        profile = chrome_trace.profile_tables(chrome_trace.load(path))
        kernels, steps = pandas.DataFrame(profile["kernels"]), profile["profiled_steps"]
        spans = kernels.groupby("span").device_us.sum().drop("other", errors="ignore").sort_values(ascending=False)
        columns[f"`{path.name}`"] = {
            "kernels and copies": kernels.calls.sum() / steps,
            "GPU busy under the profiler, %": 100 * profile["device_busy_us"] / sum(profile["step_us"]),
            "all kernels, ms": kernels.device_us.sum() / steps / 1e3,
        } | {f"{span}: kernels, ms": us / steps / 1e3 for span, us in spans.items()}
    return _columns("a step in the trace", columns) if columns else None


def _columns(title: str, columns: Mapping[str, Mapping[str, object]]) -> str:
    """A column for each dictionary, a row for each key; a key that one does not have is an empty cell."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[name, *(column.get(name) for column in columns.values())] for name in names]
    return tables.markdown([title, *columns], rows)

"""Comparing two versions: which runs and profiles are taken, what is said where none can be, and what changed in the code."""

import json
import shutil
import weakref
from pathlib import Path

from common.analysis.comparisons import source_diff, versions
from common.errors import UsageError
from common.files import write_json
from tests.conftest import ROOT, TINY, V1
from tests.records import profile, record

import pytest

V2 = ROOT / "version2_pytorch_fused"
SCRIPT = V2 / "compare_versions.py"

BEFORE = '''"""One."""

import math


def kept(x):
    return x


def attention(q):
    """Scores."""
    q = q * 2

    return q


class Block:
    size = 3

    def __init__(self):
        self.a = 1

    @property
    def area(self):
        return self.size


def dropped():
    return 0
'''
AFTER = '''"""Two."""

import math


class Block:
    size = 3

    def __init__(self):
        self.a = 2
        self.b = 3

    @property
    def area(self):
        return self.size


def kept(x):

    return x


def plain_attention(q):
    """Scores."""
    q = q * 2
    return q


def attention(q):
    return 2 * q
'''


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Two version folders with a script each and nothing measured."""
    for name, text in (("v1", BEFORE), ("v2", AFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"tiny_llama_{name}.py").write_text(text)
    return tmp_path / "v1", tmp_path / "v2"


def save(path: Path, date: str, **changes) -> None:
    write_json(path, record(**{"version": path.stem[-2:], "date": date} | changes))


def save_profile(path: Path, run: dict) -> None:
    path.parent.mkdir(parents=True)
    operator = {"name": "aten::mm", "input_shapes": "[[2, 2], [2, 2]]", "input_types": '["float", "float"]'}
    write_json(path, profile(run, [operator]))


def table_row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name))


def test_definitions_are_compared_one_by_one(folders):
    scripts = (folder / f"tiny_llama_{folder.name}.py" for folder in folders)
    changes = {change.name: change[1:] for change in source_diff.compare(*scripts)}
    assert changes == {
        "(module level)": ("changed", 2, 2, 1, 1),
        "Block": ("same", 2, 2, 0, 0),  # without its methods
        "Block.__init__": ("changed", 2, 3, 2, 1),
        "Block.area": ("same", 3, 3, 0, 0),  # with its decorator
        "kept": ("same", 2, 2, 0, 0),  # it moved, and has a blank line more
        "plain_attention": ("new, with the body of the old attention", 0, 4, 4, 0),
        "attention": ("changed", 4, 2, 1, 3),
        "dropped": ("gone", 2, 0, 0, 2),
    }


def test_the_code_of_versions_1_and_2():
    text = versions.analyze(V1, V2, None)
    code = text[text.index("## What changed in the code") :]
    assert table_row(code, "Attention.forward")[1] == "changed"
    same = code[code.index("The same in both: ") :]
    assert "RMSNorm.__init__" in same and "Attention.forward" not in same


def test_the_newest_comparable_pair_is_taken(folders):
    before, after = folders
    save(before / "metrics_old_v1.json", "2026-01-01")
    save(before / "metrics_v1.json", "2026-01-02", step_ms__median=24.0)
    save(before / "metrics_other_v1.json", "2026-01-05", training__batch_size=4)
    save(after / "metrics_v2.json", "2026-01-03", step_ms__median=6.0)
    save(after / "metrics_stopped_v2.json", "2026-01-04", status="interrupted")
    write_json(after / "gemm_metrics.json", {"schema": "another/1"})
    save(after / "metrics_v1.json", "2026-01-06", training__batch_size=4)  # Version 1, run in the other's folder
    text = versions.analyze(before, after, None)
    files = [table_row(text, f"{name}  ")[1] for name in ("v1", "v2")]
    assert files == [f"{before / 'metrics_v1.json'},", f"{after / 'metrics_v2.json'},"]
    assert table_row(text, "ms/step, median")[-3:] == ["24", "6", "4"]
    assert table_row(text, "parameters")[-2:] == ["1,000", "1,000"]


def test_losses_of_other_data_are_marked(folders):
    save(folders[0] / "metrics_v1.json", "2026-01-01")
    save(folders[1] / "metrics_v2.json", "2026-01-01", training__seed=7)
    assert "The losses cannot be compared: the runs differ in seed (0 and 7)." in versions.analyze(*folders, None)


def test_the_nearest_pair_says_why_and_what_to_run(folders):
    save(folders[0] / "metrics_v1.json", "2026-01-01")
    save(folders[0] / "metrics_far_v1.json", "2026-01-09", device__name="Another", environment__torch="2.14.0")
    save(folders[1] / "metrics_v2.json", "2026-01-01", training__batch_size=4)
    text = versions.analyze(*folders, None)
    said = " ".join(text.split())
    assert f"The nearest are {folders[0]}/metrics_v1.json and {folders[1]}/metrics_v2.json, which differ: batch size" in said
    for folder in folders:
        assert f"    (cd {folder} && python tiny_llama_{folder.name}.py --num-steps 100 --enable-pytorch-profiler)" in text
    assert "There are no profiles of v1" in said and "ms/step" not in text


def test_profiles_of_another_shape_than_the_runs_give_no_numbers(folders):
    for folder in folders:
        save(folder / f"metrics_{folder.name}.json", "2026-01-01")
        run = record(version=folder.name, date="2026-01-02", training__batch_size=4, step_ms__profiled=20)
        save_profile(folder / "scaling_bs4" / "profile_1.json", run)
    said = " ".join(versions.analyze(*folders, None).split())
    assert "batch size 8, sequence length 128; D 256" in said
    assert "No two profiles of the shape above can be compared" in said and "batch size (8 and 4)" in said
    assert "v1 ms" not in said, "no times of profiles"
    for folder in folders:
        save_profile(folder / "profiles" / "profile_1.json", record(version=folder.name, date="2026-01-01"))
    said = " ".join(versions.analyze(*folders, None).split())
    assert "v1 ms" in said and "profiles/profile_1.json" in said and "scaling_bs4" not in said


def test_real_runs_and_profiles(run_script, tmp_path):
    quick = (*TINY, "--data", "synthetic", "--num-steps", "6")
    for folder in (V1, V2):
        (tmp_path / folder.name).mkdir()
        script = next(folder.glob("tiny_llama_v*.py"))
        shutil.copy(script, tmp_path / folder.name)
        place = tmp_path / folder.name
        run_script(script, *quick, "--profile-dir", place / "a" / "b", "--metrics-out", place / f"{script.stem}_metrics.json")
    folders = "--v1", V1.name, "--v2", V2.name
    shown = run_script(SCRIPT, *folders, "--output", "made/versions.md").stdout
    written = (tmp_path / "made/versions.md").read_text()
    assert shown.endswith("written: made/versions.md\n") and "| attention |" in written and "| ms/step, median |" in written
    calls = table_row(shown, "attention")
    assert int(calls[-2]) > int(calls[-1]) > 0, "Version 2 calls fewer operators in attention"
    assert "A median is of only 3 timed steps" in shown and "v1 operator calls" in shown


@pytest.mark.parametrize(
    "first, second, message",
    [
        ("v1", "v1", "both hold tiny_llama_v1.py"),
        ("v1", "nothing", r"--v2: .*nothing holds no tiny_llama_vN.py"),
        ("both", "v2", r"--v1: .*both holds tiny_llama_v1.py and tiny_llama_v2.py"),
        ("v1", "broken", "is not valid Python"),
    ],
)
def test_folders_that_are_no_version_are_refused(folders, tmp_path, first, second, message):
    for name, scripts in (("both", {"v1": "", "v2": ""}), ("broken", {"v3": "def"})):
        (tmp_path / name).mkdir()
        for script, text in scripts.items():
            (tmp_path / name / f"tiny_llama_{script}.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        versions.analyze(tmp_path / first, tmp_path / second, None)


def test_bad_input_is_one_line(refused):
    said = refused(SCRIPT, "--v1", "missing", "--v2", V2)
    assert said.startswith("error: --v1: missing holds no tiny_llama_vN.py")


def test_a_damaged_record_is_refused(folders):
    (folders[0] / "metrics_v1.json").write_text(json.dumps(record())[:40])
    with pytest.raises(UsageError, match="metrics_v1.json is not JSON or is cut off"):
        versions.analyze(*folders, None)


def test_one_profile_is_held_at_a_time(folders, monkeypatch):
    """Ten thousand profiles were held at once, 4 GB, and all pairs of them compared."""
    for folder in folders:
        save(folder / f"metrics_{folder.name}.json", "2026-01-01")
        for number in range(20):
            run = record(version=folder.name, date=f"2026-01-{number + 2:02}", training__batch_size=4 + 4 * (number % 2))
            save_profile(folder / str(number) / "profile_1.json", run)
    alive: list[weakref.ref] = []
    real = versions.files.read_json

    class Content(dict):
        """Unlike a dict it can be referred to weakly."""

    def read(path: Path):
        assert sum(reference() is not None for reference in alive) <= 1, "the one before it, until it is replaced"
        content = Content(real(path))
        alive.append(weakref.ref(content))
        return content

    monkeypatch.setattr(versions.files, "read_json", read)
    for folder in folders:
        found = versions.newest(versions.find(folder, "--v1"))
        assert sorted((one.date, one.conditions["batch size"], one.attention_only) for one in found) == [
            ("2026-01-01", 8, None), ("2026-01-20", 4, False), ("2026-01-21", 8, False),
        ]  # fmt: skip
    assert len(alive) == 42
    monkeypatch.undo()
    said = " ".join(versions.analyze(*folders, None).split())
    assert f"{folders[0]}/19/profile_1.json" in said and "v1 ms" in said

"""Every kernel compiles for five GPUs of two vendors, spills no register, and fits into the LDS of the smallest.

compile_kernels.py runs in a process of its own: here triton may have been imported for its interpreter.
"""

import json
import os
import subprocess
import sys

from tests.conftest import PATHS, ROOT

import pytest
import torch

triton = pytest.importorskip("triton")
V3 = ROOT / "version3_triton"

from common.documents import compiled_kernels
from common.documents.rewrite import refreshed
from version3_triton.kernels import blocks

SCRIPT = V3 / "compile_kernels.py"
LDS_BYTES = 64 * 1024  # of gfx90a and gfx942
# A kernel on two targets each, so that all five occur; attention at both of its block sizes.
SOME = {
    ("gfx90a", "sm_90"): [("rms_norm", 4096), ("linear_cross_entropy", 4096)],
    ("gfx942", "sm_80"): [("swiglu", 4096), ("flash_attention", 64)],
    ("gfx950", "sm_90"): [("rope", 64), ("flash_attention", 128)],
}
# Too many keys at a time for this GPU's registers.
TOO_LARGE = "blocks.ATTENTION['sm_80', 2][64]['keys'] = blocks.Blocks(64, 128, 8, 2)"
COMPILE = """
import json, sys
from types import SimpleNamespace
from version3_triton.compile_kernels import blocks, compile_all, resources

plan = json.loads(sys.argv[1])
rows = [row for targets, cases in plan for name in targets for row in compile_all(name, ["bf16"], cases)]
exec(sys.argv[2])
spilling = compile_all("sm_80", ["bf16"], [("flash_attention", 64)])
amd = SimpleNamespace(asm={"amdgcn": sys.argv[3]}, metadata=SimpleNamespace(shared=7))
print(json.dumps([rows, spilling, resources(amd, "")]))
"""
AMD = """
    .sgpr_count:     20
    .sgpr_spill_count: 1
    .vgpr_count:     40
    .vgpr_spill_count: 3
"""


def check(compiled: dict) -> None:
    """Later Tritons bring another compiler for NVIDIA, with which some kernels spill: LOG.md."""
    never_spill = ("gfx", "sm_") if compiled["triton"].startswith(("3.6.", "3.7.")) else "gfx"
    for row in compiled["rows"]:
        assert row["registers"] > 0 and (row["spills"] == 0 or not row["target"].startswith(never_spill)), row
        assert row["shared_bytes"] <= LDS_BYTES or row["target"].startswith("sm_"), row


def test_some_of_each_kernel_for_each_target_and_one_that_spills(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(list(SOME.items())), TOO_LARGE, AMD], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{V3}{os.pathsep}{PATHS}", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, spilling, amd = json.loads(done.stdout)
    check({"triton": triton.__version__, "rows": rows})
    assert {row["target"] for row in rows} == {"gfx90a", "gfx942", "gfx950", "sm_80", "sm_90"}
    assert len({(row["file"], row["kernel"].split(" + ")[0]) for row in rows}) == 10
    assert max(row["shared_bytes"] for row in rows) > LDS_BYTES  # on NVIDIA: so the sizes do differ by target
    assert [row["kernel"] for row in spilling if row["spills"]] == ["backward_keys"]
    assert amd == {"registers": 40, "spills": 4, "shared_bytes": 7}


@pytest.mark.slow
def test_all_of_them(run_script, tmp_path):
    run_script(SCRIPT, "--output", "kernels.json", seconds=1800)
    made = json.loads((tmp_path / "kernels.json").read_text())
    check(made)
    assert len(made["rows"]) == 860
    kept = json.loads((ROOT / "results/compiled/kernels.json").read_text())["rows"]
    keys = ("target", "dtype", "file", "size", "kernel", "blocks", "warps", "stages")
    assert [[row[key] for key in keys] for row in kept] == [[row[key] for key in keys] for row in made["rows"]], "write it anew"


@pytest.mark.parametrize("path", sorted((ROOT / "results/compiled").iterdir()), ids=lambda path: path.stem)
def test_what_is_kept_in_results_neither_spills_nor_exceeds_the_lds(path):
    check(json.loads(path.read_text()))


def test_the_table_shows_the_worst_case_of_each_kernel_and_target(tmp_path):
    same = {"file": "rope", "kernel": "forward", "spills": 0}
    rows = [
        same | {"target": "gfx942", "registers": 20, "shared_bytes": 1024},
        same | {"target": "gfx942", "registers": 30, "shared_bytes": 0},
        same | {"target": "sm_90", "registers": 24, "spills": 8, "shared_bytes": 512},
    ]
    (tmp_path / "kernels.json").write_text(json.dumps({"schema": "tiny-llama-compiled/1", "triton": "3.7.1", "rows": rows}))
    assert compiled_kernels.compiled(tmp_path).splitlines()[::2] == [
        "| file | kernel | gfx942 | sm_90 |", "| rope | forward | 30, 0, 1 | 24, 8, 0.5 |", "Compiled with Triton 3.7.1.",
    ]  # fmt: skip
    assert "rms_norm" in refreshed("<!-- table: compiled results/compiled -->\n<!-- /table -->\n")


@pytest.mark.parametrize(
    "hip, gpu, capability, family",
    [
        (None, True, (9, 0), "sm_90"), (None, True, (10, 0), "sm_90"), (None, True, (8, 0), "sm_80"),
        (None, True, (8, 9), "sm_80"), (None, True, (12, 0), "sm_80"), ("7.2", True, (9, 4), "hip"), (None, False, (9, 0), "hip"),
    ],
    ids=["H100", "B200", "A100", "L40", "RTX 5090", "MI300X", "no GPU"],
)  # fmt: skip
def test_block_sizes_by_what_gpu_there_is(monkeypatch, hip, gpu, capability, family):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    blocks.family.cache_clear()
    assert blocks.family() == family
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim in (16, 64, 80, 128):
            for kernel in ("forward", "queries", "keys"):
                sizes = blocks.attention_blocks(kernel, head_dim, dtype)
                assert sizes is blocks.ATTENTION[family, dtype.itemsize][64 if head_dim <= 64 else 128][kernel]


@pytest.fixture(autouse=True)
def fresh_family():
    yield
    blocks.family.cache_clear()


@pytest.mark.parametrize("script", ["compile_kernels.py", "tune_blocks.py"])
def test_without_triton_a_line_says_so(tmp_path, script):
    hidden = "import sys; sys.modules['triton'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(V3), PATHS])
    done = subprocess.run(
        [sys.executable, "-c", hidden, str(V3 / script)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert (done.returncode, done.stderr) == (2, "error: triton is not installed here, and this script needs it\n")


def test_bad_input_is_one_line(run_script):
    done = run_script(SCRIPT, "--targets", "sm_70", check=2)
    assert "sm_70" in done.stderr and done.stderr.count("\n") == 1

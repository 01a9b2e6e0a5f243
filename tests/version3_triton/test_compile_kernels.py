"""Every kernel compiles for five GPUs of two vendors, spills no register, and fits into the LDS of the smallest.

compile_kernels.py runs in a process of its own: here triton may have been imported for its interpreter.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

from common.documents import compiled_kernels
from common.files import read_json, write_json
from tests.conftest import PATHS, ROOT, cells

import pytest
import torch

triton = pytest.importorskip("triton")
V3, KEPT = ROOT / "version3_triton", ROOT / "results/compiled"

from version3_triton.kernels import launch_sizes, offline

SCRIPT = V3 / "compile_kernels.py"
LDS_BYTES = 64 * 1024  # of gfx90a and gfx942
# Each kernel for two targets, so that all five occur; attention at both of its block sizes.
SOME = {
    ("gfx90a", "sm_90"): ["D = 4096", "V = 4096"],
    ("gfx942", "sm_80"): ["F = 4096", "Dh = 64"],
    ("gfx950", "sm_90"): ["Dh = 128"],
}
# Too many keys at a time for this GPU's registers.
TOO_LARGE = "launch_sizes.ATTENTION['sm_80', 2][64]['keys'] = launch_sizes.TileConfig(64, 128, 8, 2)"
COMPILE = """
import json, sys
from version3_triton.compile_kernels import TABLE
from version3_triton.kernels import launch_sizes
from version3_triton.kernels.offline import compile_all, shown

def compiled(name, sizes):
    return compile_all(name, ["bf16"], [launch for launch in TABLE if launch.size in sizes])

rows = [row for targets, sizes in json.loads(sys.argv[1]) for name in targets for row in compiled(name, sizes)]
exec(sys.argv[2])
print(json.dumps([rows, compiled("sm_80", ["Dh = 64"]), shown(rows)]))
"""
AMD = """
  - .agpr_count:     8
    .private_segment_fixed_size: 12
    .sgpr_count:     20
    .sgpr_spill_count: 1
    .vgpr_count:     40
    .vgpr_spill_count: 3
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
	global_load_dwordx4 v[0:3], v[4:5], off
	buffer_store_dword v4, v5, s[8:11], 0 offen
	buffer_load_dword v6, off, s[0:3], 0 offset:4
	ds_read_b128 v[0:3], v4
	ds_write_b128 v4, v[0:3]
"""
NVIDIA = "64 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\nptxas info    : Used 255 registers"


def check(triton_version: str, target: str, least_registers: int, spills: int, shared_bytes: int) -> None:
    """Later Tritons bring another compiler for NVIDIA, with which some kernels spill: LOG.md."""
    on_amd = target.startswith("gfx")
    assert least_registers > 0
    assert spills == 0 or not (on_amd or triton_version.startswith(("3.6.", "3.7.")))
    assert shared_bytes <= LDS_BYTES or not on_amd


def check_rows(triton_version: str, rows: list[dict]) -> None:
    for row in rows:
        check(triton_version, row["target"], row["registers"], row["spills"], row["shared_bytes"])


def test_some_of_each_kernel_for_each_target_and_one_that_spills(run_script, tmp_path):
    variables = {"PYTHONPATH": f"{V3}{os.pathsep}{PATHS}", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_script("-c", COMPILE, json.dumps(list(SOME.items())), TOO_LARGE, **variables)
    rows, spilling, shown = json.loads(done.stdout)
    check_rows(triton.__version__, rows)
    assert {row["target"] for row in rows} == {"gfx90a", "gfx942", "gfx950", "sm_80", "sm_90"}
    assert len({(row["file"], row["kernel"].split(" + ")[0]) for row in rows}) == 10
    assert max(row["shared_bytes"] for row in rows) > LDS_BYTES  # on NVIDIA: so the sizes do differ by target
    assert all((row["agprs"] is None) == row["target"].startswith("sm") for row in rows)
    assert all(0 < row["occupancy"] <= 100 and (row["scratch_bytes"] == 0 or row["spills"]) for row in rows)
    [worst] = [row for row in spilling if row["spills"]]
    assert worst["kernel"] == "backward_keys" and worst["scratch_bytes"] > 0
    assert {"file", "size", "kernel", "registers", "spills", "shared_bytes", "occupancy"} <= {*shown.splitlines()[0].split()}


@pytest.mark.parametrize("target, assembly, log, expected", [
    ("gfx942", {"amdgcn": AMD}, "", (40, 8, 4, 12, 100, 1, 2, 2)),
    ("sm_90", {}, NVIDIA, (255, None, 36, 64, 12, None, None, None)),
])  # fmt: skip
def test_resources_of_a_compiled_kernel(target, assembly, log, expected):
    kernel = SimpleNamespace(asm=assembly, metadata=SimpleNamespace(shared=7, num_warps=4))
    found = offline.resources(offline.TARGETS[target], kernel, log)
    columns = ("registers", "agprs", "spills", "scratch_bytes", "occupancy", "mfma", "memory", "lds")
    assert tuple(map(found.get, columns)) == expected and found["shared_bytes"] == 7


@pytest.mark.parametrize("target, registers, warps, shared_bytes, percent", [
    ("sm_80", 32, 4, 0, 100), ("sm_80", 155, 8, 49152, 12), ("sm_90", 64, 4, 76 * 1024 - 1024, 19),
    ("sm_90", 64, 4, 76 * 1024 - 1023, 12), ("gfx942", 64, 4, 0, 100), ("gfx942", 65, 4, 0, 88),
    ("gfx942", 64, 4, 32 * 1024, 25), ("gfx950", 64, 4, 32 * 1024, 62),
])  # fmt: skip
def test_occupancy_by_hand(target, registers, warps, shared_bytes, percent):
    """65,536 registers on NVIDIA, 228 KiB on sm_90 with 1 KiB for each program; 4 x 512 registers for each lane on AMD."""
    assert offline.occupancy(offline.TARGETS[target], registers, warps, shared_bytes) == percent


def test_small_matrix_instructions_spare_amds_waves_the_products_that_they_repeat(run_script, tmp_path):
    """A tile of scores 64 x 32 has two pieces of 32 x 32 for four waves. An instruction of 16 x 16 x 16 has half the FLOPs."""
    found = {}
    for name, chosen in (("own", ()), ("large", ("--matrix-instr-nonkdim", 32))):
        arguments = ("--targets", "gfx942", "--dtypes", "bf16", "--sizes", "Dh = 64", *chosen)
        run_script(SCRIPT, *arguments, "--output", f"{name}.json", seconds=600)
        found |= {(row["kernel"], name): row["mfma"] for row in read_json(tmp_path / f"{name}.json")["rows"]}
    assert found["backward_queries", "own"] / 2 == 0.6 * found["backward_queries", "large"]
    assert found["forward", "own"] == found["forward", "large"] > 0


@pytest.mark.slow
def test_attention_fits_a_t4_without_spills(run_script, tmp_path):
    sizes = [f"Dh = {size}" for size in (16, 32, 64, 80, 128)]
    run_script(
        SCRIPT, "--targets", "sm_75", "--dtypes", "fp16", "fp32", "--sizes", *sizes, "--output", "kernels.json", seconds=1800
    )
    rows = [row for row in read_json(tmp_path / "kernels.json")["rows"] if row["file"] == "flash_attention"]
    assert len(rows) == 2 * 5 * 3 and max(row["shared_bytes"] for row in rows) <= 64 << 10
    assert [row for row in rows if row["spills"]] == []


@pytest.mark.slow
def test_all_of_them(run_script, tmp_path):
    run_script(SCRIPT, "--output", "kernels.json", seconds=1800)
    made = json.loads((tmp_path / "kernels.json").read_text())
    check_rows(made["triton"], made["rows"])
    assert len(made["rows"]) == 860
    kept = read_json(KEPT / "kernels.json")["rows"]
    keys = ("target", "dtype", "file", "size", "kernel", "blocks", "warps", "stages")
    assert [[row[key] for key in keys] for row in kept] == [[row[key] for key in keys] for row in made["rows"]], "write it anew"


def test_what_is_kept_in_results_neither_spills_nor_exceeds_the_lds():
    rows, summary = read_json(KEPT / "kernels.json"), read_json(KEPT / "tritons.json")
    check_rows(rows["triton"], rows["rows"])
    for row in summary["targets"]:
        check(row["triton"], row["target"], row["least_registers"], row["largest_spill"], row["largest_shared_bytes"])
        own = [kernel["spills"] for kernel in summary["spilling"] if all(kernel[key] == row[key] for key in ("triton", "target"))]
        assert (len(own), max(own, default=0)) == (row["spilling"], row["largest_spill"])
        assert row["compiled"] == 172
    now = compiled_kernels.summary([KEPT / "kernels.json"])["targets"]
    assert now == [row for row in summary["targets"] if row["triton"] == rows["triton"]], "summarize it anew"


ROW = {
    "dtype": "fp32", "size": "Dh = 64", "blocks": "1", "warps": 1, "stages": 1, "file": "rope", "kernel": "forward", "spills": 0,
}  # fmt: skip
ROWS = [
    ROW | {"target": "gfx942", "registers": 20, "shared_bytes": 1024},
    ROW | {"target": "gfx942", "registers": 30, "shared_bytes": 0},
    ROW | {"target": "sm_90", "registers": 24, "spills": 8, "shared_bytes": 512},
]


def write(path: Path, version: str, rows: list[dict]) -> Path:
    write_json(path, {"schema": "tiny-llama-compiled/1", "triton": version, "command": "compile_kernels.py", "rows": rows})
    return path


def test_a_summary_of_several_tritons_keeps_the_extremes_and_the_rows_that_spill(execute, tmp_path):
    files = [write(tmp_path / "old.json", "3.7.1", ROWS[:2]), write(tmp_path / "new.json", "3.9.0", [*ROWS, *ROWS[2:]])]
    execute(SCRIPT, "--summarize", *files, "--output", "tritons.json")
    made = read_json(tmp_path / "tritons.json")
    columns = ("triton", "target", "compiled", "spilling", "largest_spill", "least_registers", "largest_shared_bytes")
    assert [tuple(map(row.get, columns)) for row in made["targets"]] == [
        ("3.7.1", "gfx942", 2, 0, 0, 20, 1024), ("3.9.0", "gfx942", 2, 0, 0, 20, 1024), ("3.9.0", "sm_90", 2, 2, 8, 24, 512),
    ]  # fmt: skip
    assert made["spilling"] == 2 * [{"triton": "3.9.0"} | ROWS[2]]
    assert cells(compiled_kernels.tritons(tmp_path)) == [
        ["Triton", "gfx942", "sm_90"], ["3.7.1", "0 of 2", ""], ["3.9.0", "0 of 2", "2 of 2, at most 8"],
    ]  # fmt: skip


@pytest.mark.parametrize("hip, gpu, capability, family", [
    (None, True, (9, 0), "sm_90"), (None, True, (10, 0), "sm_90"), (None, True, (8, 0), "sm_80"),
    (None, True, (8, 9), "sm_80"), (None, True, (12, 0), "sm_80"), (None, True, (7, 5), "sm_75"),
    ("7.2", True, (9, 4), "hip"), (None, False, (9, 0), "hip"),
], ids=["H100", "B200", "A100", "L40", "RTX 5090", "T4", "MI300X", "no GPU"])  # fmt: skip
def test_block_sizes_by_what_gpu_there_is(monkeypatch, hip, gpu, capability, family):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert launch_sizes.family_of_this_gpu.__wrapped__() == family  # without its cache


@pytest.mark.parametrize("script", ["compile_kernels.py", "tune_blocks.py"])
def test_without_triton_a_line_says_so(run_script, tmp_path, script):
    hidden = "import sys; sys.modules['triton'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(V3), PATHS])
    *_, said = run_script("-c", hidden, V3 / script, check=2, PYTHONPATH=paths).stderr.splitlines()  # a busy machine says more
    assert said == "error: triton is not installed here, and this script needs it"


@pytest.mark.parametrize("arguments, said", [
    (("--targets", "sm_70"), "sm_70"),
    (("--summarize", "kernels.json"), "--summarize needs --output"),
    (("--sizes", "Dh = 65"), "--sizes 'Dh = 65': it is one of D = 256, "),
    (("--waves-per-eu", 3), "--waves-per-eu is for AMD's targets, not sm_80: name some with --targets"),
])  # fmt: skip
def test_bad_input_is_one_line(refused, arguments, said):
    assert said in refused(SCRIPT, *arguments)


def test_a_triton_that_cannot_compile_without_a_gpu_is_refused(refused, monkeypatch):
    monkeypatch.delattr(triton, "knobs")
    assert "this script needs 3.4 or newer" in refused(SCRIPT)

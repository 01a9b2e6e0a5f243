"""Version 3's kernels in a profile, of a run or of a file."""

from common.config import ModelConfig
from common.files import write_json
from tests.conftest import ROOT, TINY
from tests.records import profile, record

import pytest

pytest.importorskip("triton")

SCRIPT = ROOT / "version3_triton/run_triton_profiling.py"
CEILINGS = {"bytes_per_second": 1e12, "flops_per_second": 1e14, "operation_seconds": 1e-6, "precision": "bf16"}
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "3", "--warmup-steps", "1")


def test_a_gpu_profile_is_shown_by_the_costs_of_its_run(execute, tmp_path):
    run = record(version="v3", precision__compute="bf16", ceilings=CEILINGS)
    launched = [{"name": "_rope_forward", "device_us": 20.0}, {"name": "_flash_attention_forward", "device_us": 100.0},
                {"name": "sm90_gemm", "device_us": 120.0}]  # fmt: skip
    write_json(tmp_path / "profile_1.json", profile(run, [{"name": "aten::mm"}], launched))
    shown = execute(SCRIPT, "--analyze-existing", "profile_1.json").out
    [rope], [attention] = ([line.split() for line in shown.splitlines() if line.startswith(name)] for name in ("rope", "flash"))
    moved = 4 * 8 * 128 * 2 * 32 * 16 * 2  # layers, B, S, q and k, Dh, heads, bytes; read and written
    computed = 4 * 2 * 2 * 8 * 256 * 128 * 129 / 2  # layers, products, B, D, pairs
    assert ModelConfig().num_layers == 4 and float(rope[6]) == pytest.approx(moved / 1e6, rel=0.01)  # MB
    assert float(rope[7].replace(",", "")) == pytest.approx(moved / 20e-6 / 1e9, rel=0.01)  # GB/s
    assert float(attention[-2]) == pytest.approx(computed / 100e-6 / 1e12, rel=0.01)  # TFLOP/s
    assert "120 us of a step, 50.0 %" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["profile_1.json"]  # nothing was run

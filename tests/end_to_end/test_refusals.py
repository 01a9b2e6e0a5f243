"""What the scripts of the studies refuse: in one line that names it, before anything is written."""

from tests.conftest import ROOT

import pytest

V1, V2, V3, V4 = (
    f"{ROOT}/version{name}"
    for name in ("1_pytorch_baseline", "2_pytorch_fused", "3_triton", "4_ultra_fused")
)
BASELINE, FUSED = f"--baseline {V1}/tiny_llama_v1.py", f"--optimized {V2}/tiny_llama_v2.py"
REFUSED = {
    f"{V1}/analyze_gemm_operations.py": {
        "--batch-sizes 4,zero": "'zero' is not a positive whole number",
        "--device cuda": "PyTorch sees no GPU",
    },
    f"{V1}/tiny_llama_v1.py": {"--learning-rate nan": "learning_rate = nan"},
    f"{V1}/predict.py": {"a b --check --expect 1.3": "leave --expect out"},
    f"{V3}/benchmark_kernels.py": {"--sizes 512x128 --seq-len 64": "leave --seq-len out"},
    f"{V2}/performance_regression_test.py": {
        "--baseline-results a --current-results b --min-speedup nan": "'nan' is not a number from 0 on",
    },
    f"{V2}/benchmark_suite.py": {
        "--models v1,v9": "--models: there is no 'v9'; there are v1, v2, ",
        "--output-dir wrong.yaml/out": "error: --output-dir: cannot write in",
    },
    f"{V2}/fusion_ablation_study.py": {"--num-steps 5": "unrecognized arguments: --num-steps"},
    f"{V2}/optimize_batch_size.py": {
        "--target-memory-usage nan": "above 0 and at most 1",
        "--torch-compile-mode default": "needs --enable-torch-compile",
    },
    f"{V2}/validate_numerical_accuracy.py": {
        f"{BASELINE} --optimized missing.py": "missing.py",
        f"{BASELINE} {FUSED} --disable-everything": "--disable-everything",
    },
}


@pytest.mark.parametrize(
    "script, flags, message",
    [(script, *case) for script, cases in REFUSED.items() for case in cases.items()],
    ids=lambda value: value.removeprefix(f"{ROOT}/").replace(f"{ROOT}/", "")[:60],
)
def test_bad_input_is_one_line_and_nothing_is_written(refused, tmp_path, script, flags, message):
    (tmp_path / "wrong.yaml").write_text("model: {hidden: 3}\n")
    assert message in refused(script, *flags.split())
    # a folder that stays empty
    left = {path.name for path in tmp_path.rglob("*")} - {"batch_size_search"}
    assert left == {"wrong.yaml"}

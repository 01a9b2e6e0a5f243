"""What the scripts of the studies refuse: in one line that names it, before anything is written."""

from tests.conftest import ROOT

import pytest

V1, V2, V3, V4 = (f"{ROOT}/version{name}" for name in ("1_pytorch_baseline", "2_pytorch_fused", "3_triton", "4_ultra_fused"))
BASELINE, FUSED = f"--baseline {V1}/tiny_llama_v1.py", f"--optimized {V2}/tiny_llama_v2.py"
REFUSED = {
    f"{V1}/analyze_gemm_operations.py": {
        "--batch-sizes 4,zero": "'zero' is not a positive whole number",
        "--sequence-lengths 64,-1": "'-1' is not a positive whole number",
        "--model-config none.yaml": "cannot read none.yaml",
        "--model-config wrong.yaml": "unknown key model.hidden",
        "--device cuda": "PyTorch sees no GPU",
        "--output-dir wrong.yaml": "--output-dir: cannot write in wrong.yaml",
    },
    f"{V1}/tiny_llama_v1.py": {"--learning-rate nan": "learning_rate = nan"},
    f"{V1}/predict.py": {"a b --check --expect 1.3": "leave --expect out"},
    f"{V3}/benchmark_kernels.py": {"--sizes 512x128 --seq-len 64": "leave --seq-len out"},
    f"{V2}/performance_regression_test.py": {
        "--baseline-results a --current-results b --min-speedup nan": "'nan' is not a number from 0 on",
        "--baseline-results a --current-results b --loss-tolerance -1": "'-1' is not a number from 0 on",
    },
    f"{V2}/benchmark_suite.py": {
        "--models v1,v9": "--models: there is no 'v9'; there are v1, v2, ",
        "--models v1,v1": "--models: v1 is given twice",
        "--models=": "--models: there is no ''",
        "--metrics speed": "--metrics: there is no 'speed'; there are throughput, memory, accuracy",
        "--batch-sizes 4,x": "'x' is not a positive whole number",
        "--batch-sizes 4,4": "--batch-sizes: 4 is given twice",
        "--seq-lengths 0": "'0' is not a positive whole number",
        "--batch-size 4": "unrecognized arguments: --batch-size",
        "--config none.yaml": "cannot read none.yaml",
        "--repeats 0": "'0' is not a positive whole number",
        "--output-dir wrong.yaml/out": "error: --output-dir: cannot write in",
    },
    f"{V2}/fusion_ablation_study.py": {
        "--rounds 0": "'0' is not a positive whole number",
        "--batch-size -1": "'-1' is not a positive whole number",
        "--num-steps 5": "unrecognized arguments: --num-steps",
        "--config none.yaml": "cannot read none.yaml",
    },
    f"{V2}/optimize_batch_size.py": {
        **{f"--target-memory-usage {share}": "above 0 and at most 1" for share in ("1.01", "0", "-0.1", "nan", "inf")},
        "--target-memory-usage much": "invalid float value: 'much'",
        "--optimization-target speed": "invalid choice: 'speed'",
        "--max-batch-size 0": "not a positive whole number",
        "--max-step-seconds 0.5": "not a positive whole number",
        "--output-dir /proc/nowhere": "--output-dir: cannot write",
        "--batch-size 8": "takes no --batch-size",
        "--torch-compile-mode default": "needs --enable-torch-compile",
        "--seq-len -1": "--seq-len: '-1' is not",
    },
    f"{V2}/validate_numerical_accuracy.py": {
        BASELINE: "--optimized",
        f"{BASELINE} --optimized missing.py": "missing.py",
        f"{BASELINE} {FUSED} --tolerance inf": "'inf' is not a number from 0 on",
        f"{BASELINE} {FUSED} --seq-len 1": "training.sequence_length = 1",
        f"{BASELINE} {FUSED} --capture-step": "takes no --capture-step",
        f"{BASELINE} {FUSED} --disable-everything": "--disable-everything",
    },
    f"{V4}/scaling_study.py": {
        "--models v9": "--models: there is no 'v9'; there are v1, ",
        "--models hf": "--models: there is no 'hf'",
        "--parallel zero3": "--parallel: there is no 'zero3'; there are ddp, zero1, fsdp",
        "--processes 2,2": "--processes: 2 is given twice",
        "--processes 0": "'0' is not a positive whole number",
    },
}


@pytest.mark.parametrize(
    "script, flags, message", [(script, *case) for script, cases in REFUSED.items() for case in cases.items()],
    ids=lambda value: value.removeprefix(f"{ROOT}/").replace(f"{ROOT}/", "")[:60],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(refused, tmp_path, script, flags, message):
    (tmp_path / "wrong.yaml").write_text("model: {hidden: 3}\n")
    assert message in refused(script, *flags.split())
    left = {path.name for path in tmp_path.rglob("*")} - {"batch_size_search"}  # a folder that stays empty
    assert left == {"wrong.yaml"}

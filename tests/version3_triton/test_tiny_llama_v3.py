"""Version 3 as a version: the weights and losses of Version 1, its switches, what its tools count and show.

Without a GPU the kernels run in Triton's interpreter, about a second a training step; tests/test_triton_kernels.py tests each.
"""

import json
import shutil
from argparse import Namespace
from collections import Counter

from tests.conftest import ROOT, TINY, V1, needs_interpreter, runs_kernels
from tests.stand_ins import Machine, value

import pytest
import torch

V3 = ROOT / "version3_triton"
SCRIPT = V3 / "tiny_llama_v3.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "3", "--warmup-steps", "1")

triton = pytest.importorskip("triton")
from common import cli
from common import device as devices
from common.analysis.formulas import flops
from common.analysis.reports import triton_kernels
from common.config import ModelConfig
from common.precision import Precision
from common.training import (
    flop_counters,
    run,
)
from version1_pytorch_baseline import tiny_llama_v1
from version3_triton import (
    kernels,
    tiny_llama_v3,
)
from version3_triton.kernels import costs, flash_attention, linear_cross_entropy, rms_norm, rope, swiglu  # noqa: F401 (interpreted)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = kernels.choose(DEVICE)
CONFIG = ModelConfig(
    vocab_size=61, hidden_size=48, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80
)


def pair(operations: kernels.Operations, device: torch.device = DEVICE):
    """Version 1 and Version 3 from the same seed, and a batch of odd length."""
    models = []
    for build in (lambda: tiny_llama_v1.TinyLlama(CONFIG), lambda: tiny_llama_v3.TinyLlama(CONFIG, operations)):
        torch.manual_seed(0)
        models.append(build().to(device))
    ids = torch.randint(61, (2, 2, 17), device=device)
    return *models, (ids[0], ids[1])


def losses(version, model, batch, precision: Precision, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [version.train_step(model, optimizer, batch, precision).item() for _ in range(steps)]


# ------------------------------------------------------------------------------------------------------- the same model


def test_same_start_weights_as_version_1_and_its_state_dict_comes_back():
    first, third, _ = pair(KERNELS)
    state = third.baseline_state_dict()
    assert list(state) == list(first.state_dict())
    assert all(torch.equal(weight, first.state_dict()[name]) for name, weight in state.items())
    with torch.no_grad():
        for weight in first.parameters():
            weight.add_(torch.randn_like(weight))
    assert third.load_state_dict(first.state_dict()) == ([], [])
    for name, weight in third.baseline_state_dict().items():
        assert torch.equal(weight, first.state_dict()[name]), name


@pytest.mark.parametrize(
    "operations, steps, tolerance",
    [pytest.param(kernels.REFERENCE, 5, 1e-6, id="plain"), pytest.param(KERNELS, 2, 1e-5, id="triton", marks=runs_kernels)],
)
def test_losses_of_version_1(operations, steps, tolerance):
    first, third, batch = pair(operations)
    precision = Precision(DEVICE, None)
    expected = losses(tiny_llama_v1, first, batch, precision, steps)
    assert losses(tiny_llama_v3, third, batch, precision, steps) == pytest.approx(expected, abs=tolerance)
    assert all(parameter.grad is None for parameter in third.parameters())  # train_step leaves none behind
    assert expected[-1] < expected[0]


@runs_kernels
def test_every_parameter_gets_the_gradient_of_version_1():
    first, third, batch = pair(KERNELS)
    for model in (first, third):
        model.loss(*batch).backward()
    with torch.no_grad():
        for parameter in third.parameters():
            parameter.copy_(parameter.grad)  # so that they come back under Version 1's names
    got = third.baseline_state_dict()
    for name, parameter in first.named_parameters():
        assert parameter.grad.any()
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_state_dict_of_its_own_loads():
    _, third, _ = pair(kernels.REFERENCE)
    assert tiny_llama_v3.TinyLlama(CONFIG).load_state_dict(third.state_dict()) == ([], [])


@needs_interpreter
def test_another_script_validates_it_with_its_kernels(run_script, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "small.yaml").write_text(
        "model: {hidden_size: 16, num_layers: 1, num_attention_heads: 2, intermediate_size: 16, vocab_size: 16}"
    )
    script = ROOT / "version2_pytorch_fused/validate_numerical_accuracy.py"
    small = ("--config", "small.yaml", "--batch-size", "1", "--seq-len", "4")
    run_script(script, "--baseline", V1 / "tiny_llama_v1.py", "--optimized", SCRIPT, *small)


@runs_kernels
def test_the_loss_computes_no_gradients_where_none_are_wanted():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight = torch.randn(1, 4, 8, device=DEVICE), torch.randn(16, 8, device=DEVICE, requires_grad=True)
    targets = torch.zeros(1, 4, dtype=torch.long, device=DEVICE)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        KERNELS.linear_cross_entropy(x, weight, targets)
    assert counter.get_total_flops() == 2 * 4 * 8 * 16


# ------------------------------------------------------------------------------------------------------------- switches


def options(*flags: str) -> Namespace:
    return cli.parse(run.parser(tiny_llama_v3).parse_args([*TINY, *flags]))


def test_without_switches_every_operation_is_a_kernel():
    operations = tiny_llama_v3.make_model(options()).operations
    assert all(getattr(operations, name) is not getattr(kernels.REFERENCE, name) for name in vars(operations))
    assert all(tiny_llama_v3.describe(options()).values())


@pytest.mark.parametrize("switch", kernels.SWITCHES)
def test_a_switch_gives_its_operations_back_to_pytorch_and_no_others(switch):
    chosen = options(f"--disable-triton-{switch}")
    operations = tiny_llama_v3.make_model(chosen).operations
    plain = {name for name in vars(operations) if getattr(operations, name) is getattr(kernels.REFERENCE, name)}
    assert plain == set(kernels.SWITCHES[switch])
    described = tiny_llama_v3.describe(chosen)
    assert [name for name, on in described.items() if not on] == [f"triton_{switch}"]


def test_every_operation_has_a_switch():
    switched = [operation for operations in kernels.SWITCHES.values() for operation in operations]
    assert sorted(switched) == sorted(vars(kernels.REFERENCE))


def test_without_a_gpu_a_line_says_so_and_the_record_says_why(run_script, tmp_path):
    done = run_script(SCRIPT, *QUICK, "--metrics-out", "v3.json")
    assert done.stderr == (
        "no Triton kernels: they need a GPU (or TRITON_INTERPRET=1, which interprets them on a CPU); "
        "PyTorch's operations run in their place\n"
    )
    settings = json.loads((tmp_path / "v3.json").read_text())["settings"]
    assert "need a GPU" in settings.pop("no_kernels")
    assert settings == {f"triton_{name}": False for name in kernels.SWITCHES}


@needs_interpreter
def test_it_runs_the_kernels_in_the_interpreter_when_asked(run_script, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = ("--num-layers", "1", "--num-steps", "1", "--vocab-size", "16", "--seq-len", "4", "--batch-size", "1")
    done = run_script(SCRIPT, *QUICK, *small, "--disable-triton-loss", "--metrics-out", "v3.json")
    assert not done.stderr
    settings = json.loads((tmp_path / "v3.json").read_text())["settings"]
    assert settings == {f"triton_{name}": name != "loss" for name in kernels.SWITCHES}


def test_a_head_that_the_kernel_does_not_take_is_one_line(run_script, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = (*QUICK, "--num-layers", "1", "--hidden-dim", "272", "--num-heads", "2", "--seq-len", "2", "--vocab-size", "16")
    done = run_script(SCRIPT, *wide, check=2)
    assert done.stderr == "error: the attention kernel takes head dimensions to 128, not 136: switch it off\n"


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def counted(*kernels_on: str, seq_len: int = 17) -> dict[str, int]:
    off = [name for name in kernels.SWITCHES if name not in kernels_on]
    model = tiny_llama_v3.TinyLlama(CONFIG, kernels.choose(DEVICE, off)).to(DEVICE)
    ids = torch.randint(61, (2, 2, seq_len), device=DEVICE)
    return flop_counters.counted_by_torch(model, (ids[0], ids[1]))


@runs_kernels
def test_the_attention_kernel_is_counted():
    """As PyTorch's own fused attention; its two backward kernels compute two products twice."""
    plain, own = counted(), counted("attention")
    product = 2 * 2 * 17 * 17 * CONFIG.hidden_size * CONFIG.num_layers  # B, S, S
    assert own["forward"] == plain["forward"] == flops.forward(CONFIG, 2, 17, causal=False)["total"]
    assert own["backward"] == plain["backward"] + 2 * product


@runs_kernels
def test_the_loss_is_counted_where_it_computes():
    plain, own = counted(), counted("loss")
    gradients = 2 * 2 * 2 * 17 * CONFIG.hidden_size * CONFIG.vocab_size  # of x and of the weight, in the forward pass
    assert own == {"forward": plain["forward"] + gradients, "backward": plain["backward"] - gradients}


@runs_kernels
def test_deepspeed_counts_one_forward_pass(tmp_path):
    pytest.importorskip("deepspeed")
    first, third, batch = pair(KERNELS)
    for model in (first, third):
        model.counted = flop_counters.counted_by_deepspeed(model, batch, tmp_path / "report.txt")
    assert third.counted["forward"] == pytest.approx(flops.forward(CONFIG, 2, 17, causal=False)["total"], rel=0.01)
    assert third.counted["forward"] <= first.counted["forward"] and third.counted["backward"] == 2 * third.counted["forward"]


# ------------------------------------------------------------------------------------------------------------ profiling


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts what the interpreter is given")
@needs_interpreter
def test_bytes_by_formula_are_those_of_the_tensors_that_kernels_get(monkeypatch):
    """Each once, but for the logits, which are read and written; small ones are left out, as in the formula."""
    from triton.runtime.interpreter import InterpretedFunction

    left_out = {"weight", "rstd", "by_part", "dweight", "cos", "sin", "lse", "d", "targets", "losses"}
    given: Counter = Counter()

    def note(self, *arguments, grid, warmup, **constants):
        tensors = {
            tensor.data_ptr(): tensor.numel() * tensor.element_size() * (2 if name == "logits_ptr" else 1)
            for name, tensor in zip(self.arg_names, arguments, strict=False)
            if isinstance(tensor, torch.Tensor) and name.removesuffix("_ptr") not in left_out
        }
        given[self.fn.__name__] += sum(tensors.values())
        return original(self, *arguments, grid=grid, warmup=warmup, **constants)

    original = InterpretedFunction.run
    monkeypatch.setattr(InterpretedFunction, "run", note)
    _, third, batch = pair(KERNELS)
    third.loss(*batch).backward()
    expected: Counter = Counter()
    for (kernel, _), cost in costs.training_step(CONFIG, 2, 17, 4).items():
        expected[kernel] += cost.bytes or 0
    assert given == expected


def gpu_profile() -> dict:
    """Two profiled steps at V3's default configuration in bf16, with two kernels of ours and one of a library."""
    kernel = {"span": "attention", "phase": "forward", "calls": 8}
    return {
        "run": {
            "version": "v3", "device": {"name": "a GPU"}, "precision": {"compute": "bf16"}, "model": ModelConfig().model_dump(),
            "training": {"batch_size": 8, "sequence_length": 128},
            "step_ms": {"all": [1.0] * 9, "profiled": 0, "median": 1.0, "count": 9},
            "ceilings": {"bytes_per_second": 1e12, "flops_per_second": 1e14},
        },
        "schema": "tiny-llama-profile/1", "profiled_steps": 2, "step_us": [1000.0, 1000.0], "attention_only": False,
        "operators": [{"name": "aten::mm"}],
        "kernels": [
            kernel | {"name": "_rope_forward", "device_us": 20.0},
            kernel | {"name": "_rope_forward", "device_us": 40.0, "phase": "backward"},
            kernel | {"name": "_flash_attention_forward", "device_us": 100.0},
            kernel | {"name": "_rms_norm_dweight", "device_us": 4.0, "phase": "backward"},
            kernel | {"name": "sm90_gemm", "device_us": 236.0},
        ],
    }  # fmt: skip


def test_kernels_of_a_profile_against_the_ceilings():
    profile = gpu_profile()
    header, rows = triton_kernels.table(profile, costs.training_step(ModelConfig(), 8, 128, 2))
    assert [row[0] for row in rows] == ["flash_attention_forward", "rope_forward", "rope_forward", "rms_norm_dweight"]
    assert [row[1:4] for row in rows[1:3]] == [["backward", "rope", 4.0], ["forward", "rope", 4.0]]
    assert rows[3][4:] == [2.0, 1.0, *[None] * 5]
    attention, _, forward, _ = (dict(zip(header, row, strict=True)) for row in rows)
    moved = 4 * 8 * 128 * 2 * 32 * 16 * 2  # layers, B, S, q and k, Dh, heads, bytes; read and written
    assert forward["us"] == 10 and forward["% of kernels"] == 5
    assert forward["GB/s"] == pytest.approx(moved / 10e-6 / 1e9) and forward["% of copy"] == pytest.approx(moved / 10e-6 / 1e10)
    assert forward["TFLOP/s"] is None
    computed = 4 * 2 * 2 * 8 * 256 * 128 * 129 / 2  # layers, products, B, D, pairs
    assert attention["TFLOP/s"] == pytest.approx(computed / 50e-6 / 1e12)
    assert attention["% of GEMM"] == pytest.approx(computed / 50e-6 / 1e12)


def test_a_gpu_profile_is_shown_without_running_anything(run_script, tmp_path):
    (tmp_path / "profile_1.json").write_text(json.dumps(gpu_profile()))
    shown = run_script(V3 / "run_triton_profiling.py", "--analyze-existing", "profile_1.json").stdout
    assert "Triton kernels: 82 us a step, 41.0 % of the time of all kernels" in shown and "flash_attention_forward" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["profile_1.json"]


def test_on_a_cpu_the_operators_are_shown(run_script):
    shown = run_script(V3 / "run_triton_profiling.py", *QUICK).stdout
    assert "\nno Triton kernel ran in this profile\n" in shown and "aten::mm" in shown


@pytest.mark.parametrize("script", ["run_pytorch_profiler.py", "run_deepspeed_flops.py"])
def test_the_other_tools_run(run_script, tmp_path, script):
    run_script(V3 / script, *QUICK)
    assert list(tmp_path.glob("pytorch_profiles/profile_*.json")) or (tmp_path / "flops_analysis/flops_profile.json").exists()


def test_rocprofv3_gets_version_3(tmp_path):
    machine = Machine(tmp_path)
    machine.tools("rocprofv3")
    machine.command("python", shutil.which("true"))
    machine.run(V3 / "run_rocprof_triton.sh", "--profile-dir", "out", "--marker-trace", "--num-steps", "7")
    [call] = machine.calls
    options, command = call[: call.index("--")], call[call.index("--") + 1 :]
    assert "--marker-trace" in options and value(options, "-d") == "out"
    assert command[:2] == ["python", str(SCRIPT)] and value(command, "--num-steps") == "7"
    assert "bash run_rocprof_triton.sh [--profile-dir DIR]" in machine.run(V3 / "run_rocprof_triton.sh", "--help").stdout


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_it_trains_as_version_1_on_the_gpu(dtype):
    devices.prepare(DEVICE, 0)
    first, third, batch = pair(KERNELS)
    curves = [
        losses(version, model, batch, Precision(DEVICE, dtype), 10)
        for version, model in ((tiny_llama_v1, first), (tiny_llama_v3, third))
    ]
    assert curves[1] == pytest.approx(curves[0], abs=1e-4 if dtype is None else 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_parameter_gets_a_gradient_under_autocast(dtype):
    _, third, batch = pair(KERNELS)
    precision = Precision(DEVICE, dtype)
    with precision.autocast():
        loss = third.loss(*batch)
    precision.scale(loss).backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in third.parameters())


@pytest.mark.gpu
def test_the_same_seed_gives_the_same_bits():
    devices.prepare(DEVICE, 0)
    curves = []
    for _ in range(2):
        _, third, batch = pair(KERNELS)
        torch.manual_seed(1)
        curves.append(losses(tiny_llama_v3, third, batch, Precision(DEVICE, torch.bfloat16), 5))
    assert curves[0] == curves[1]


def test_costs_under_autocast_by_hand():
    """Bytes by costs.py's table at e = 2: the residual stream is float32; FLOPs of the pairs that are not masked."""
    config, e, tokens = ModelConfig(num_key_value_heads=4), 2, 8 * 128
    layers, d, h, k, dh, f, v = 4, 256, 8, 4, 32, 512, 1000
    product = 2 * d * 8 * 128 * 129 // 2 * layers
    rotated = tokens * layers * 2 * dh * (h + k) * e
    found = {key: (cost.bytes, cost.flops) for key, cost in costs.training_step(config, 8, 128, e).items()}
    assert found == {
        ("_rms_norm_forward", "forward"): (tokens * d * (4 + e + 2 * layers * (8 + 2 * e)), None),
        ("_rms_norm_backward", "backward"): (tokens * d * (8 + e + (2 * layers - 1) * (12 + 2 * e) + 8 + 2 * e), None),
        ("_rms_norm_dweight", "backward"): (None, None),
        ("_rope_forward", "forward"): (rotated, None), ("_rope_forward", "backward"): (rotated, None),
        ("_flash_attention_forward", "forward"): (tokens * layers * dh * (2 * h + 2 * k) * e, 2 * product),
        ("_flash_attention_backward_queries", "backward"): (tokens * layers * dh * (4 * h + 2 * k) * e, 3 * product),
        ("_flash_attention_backward_keys", "backward"): (tokens * layers * dh * (2 * h + 4 * k) * e, 4 * product),
        ("_swiglu_forward", "forward"): (tokens * layers * 3 * f * e, None),
        ("_swiglu_backward", "backward"): (tokens * layers * 5 * f * e, None),
        ("_linear_cross_entropy_loss_and_gradient", "forward"): (tokens * 2 * v * e, None),
    }  # fmt: skip

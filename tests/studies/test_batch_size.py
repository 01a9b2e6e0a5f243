"""The search for a batch size: its logic on made-up machines, trials in processes of their own, and
the script.
"""

import math
from collections.abc import Callable

from studies import batch_size, version_files
from tests.conftest import ROOT, altered_version
from tracepage.errors import RunError
from tracepage.files import read_json

import pytest

FITS, OVER, OUT = "ok", "over target", "out of memory"
SCRIPT = ROOT / "version2_pytorch_fused/optimize_batch_size.py"


def trial(size: int, status: str, ms: float | None = None) -> dict:
    step = ms and {"median": ms, "p20": ms, "p80": ms, "count": 5}
    numbers = {
        "step_ms": step,
        "tokens_per_second": ms and size / ms,
        "peak_mib": ms and 100.0 + size,
    }
    return {"batch_size": size, "status": status} | numbers


class Machine:
    """Steps of fixed + per_sample B ms, at least `least`; more than `room` samples are out of
    memory, `allowed` over target.
    """

    def __init__(self, fixed=0.0, per_sample=1.0, least=0.0, room=math.inf, allowed=math.inf):
        self.time = lambda size: max(fixed + per_sample * size, least)
        self.room, self.allowed, self.sizes = room, allowed, []

    def __call__(self, size: int) -> dict:
        assert size not in self.sizes, "tried twice"
        self.sizes.append(size)
        return (
            trial(size, OUT)
            if size > self.room
            else trial(size, OVER if size > self.allowed else FITS, self.time(size))
        )


@pytest.mark.parametrize("limit", [1, 100, 1000])
@pytest.mark.parametrize("kind", ["room", "allowed"])
def test_memory_finds_the_largest_that_fits_to_a_sixteenth(limit, kind):
    machine = Machine(**{kind: limit})
    found = batch_size.search(machine, "memory", 4096)
    assert (
        found["batch_size"]
        <= limit
        < found["batch_size"] + max(1, found["batch_size"] // batch_size.RESOLUTION)
    )
    assert len(machine.sizes) < 18
    status = OUT if kind == "room" else OVER
    assert f"does not fit: {status}" in found["ended"]


def test_not_even_one_sample_fits():
    with pytest.raises(
        RunError, match=r"not even batch size 1 fits \(over target\): lower --seq-len"
    ):
        batch_size.search(Machine(allowed=0), "throughput", 4096)


def test_a_step_that_takes_long_ends_the_doubling():
    machine = Machine(per_sample=300.0)
    found = batch_size.search(machine, "memory", 4096)
    assert found["ended"] == "a step of batch size 8 takes more than 2 s" and found[
        "batch_size"
    ] == 8 == max(machine.sizes)


def test_throughput_is_the_smallest_and_latency_the_largest_within_two_percent():
    machine = Machine(fixed=10.0, room=2000)
    found = batch_size.search(machine, "throughput", 4096)
    rates = {size: size / machine.time(size) for size in machine.sizes if size <= 2000}
    assert found["ended"] == f"batch size 2048 does not fit: {OUT}"
    assert (
        found["batch_size"]
        == min(size for size in rates if rates[size] * 1.02 >= max(rates.values()))
        == 512
    )
    assert batch_size.search(Machine(least=33, room=100), "latency", 4096)["batch_size"] == 32


# ------------------------------------------------------------------------------------------------------------- trials


@pytest.fixture
def measured(config, tmp_path) -> Callable[[str], dict]:
    """measured(statement): a search up to batch size 3 with Version 1 whose training step begins
    with this statement.
    """
    parser = version_files.parser(None, "--batch-size")
    parsed = parser.parse_args(["--config", str(config), "--device", "cpu"])
    parsed.target_memory_usage, parsed.optimization_target, parsed.max_batch_size = 1.0, "memory", 3
    path = tmp_path / "batch_search.json"

    def measure(statement: str) -> dict:
        version = version_files.load(altered_version(tmp_path, statement))
        assert batch_size.measure(version, parsed, [], path) == 0
        return read_json(path)

    return measure


def test_each_trial_has_a_peak_of_its_own_and_the_kernel_may_kill_one(measured, capsys):
    """768 MiB are kept at batch size 1, 512 at 2, both more than importing PyTorch takes, and at 3
    the process is killed.
    """
    statement = (
        "if len(batch[0]) == 3: os.kill(os.getpid(), 9)\n        if not hasattr(torch, 'kept'): "
    )
    statement += "torch.kept = torch.ones((4 - len(batch[0])) * 2**26)"
    found = measured(statement)
    assert [(trial["batch_size"], trial["status"]) for trial in found["trials"]] == [
        (1, FITS),
        (2, FITS),
        (3, OUT),
    ]
    assert found["trials"][0]["peak_mib"] - found["trials"][1]["peak_mib"] == pytest.approx(
        256, abs=40
    )
    assert (
        found["batch_size"] == 2
        and found["version"] == "altered"
        and found["memory_kind"] == "process RSS since its start"
    )
    assert "batch size     3  out of memory\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- script


@pytest.mark.usefixtures("config")
def test_the_script_as_documented(execute, tmp_path):
    flags = "--target-memory-usage 0.8 --seq-len 8 --optimization-target throughput --config small.yaml --max-batch-size 2 --device cpu"
    printed = execute(SCRIPT, *flags.split(), "--disable-flash-attention", "--use-amp")
    folder = tmp_path / "batch_size_search"
    assert sorted(path.suffix for path in folder.iterdir()) == [".csv", ".json", ".md"]
    measured = read_json(folder / "batch_search.json")
    assert measured["settings"] == {
        "qkv_fusion": True,
        "flash_attention": False,
        "swiglu_fusion": True,
        "fused_adamw": True,
        "torch_compile": False,
    }
    assert measured["precision"] == {"compute": "bf16"} and measured["target_memory_usage"] == 0.8
    answer = next(
        trial for trial in measured["trials"] if trial["batch_size"] == measured["batch_size"]
    )
    assert answer["tokens_per_second"] == pytest.approx(
        answer["batch_size"] * 8 / answer["step_ms"]["median"] * 1e3
    )
    for text in (printed.out, (folder / "batch_search.md").read_text()):
        assert (
            f"Batch size for throughput: {measured['batch_size']}. It is the smallest tried within 2 %"
            in text
        )
        assert "Doubling ended: " in text and "flash attention off" in text

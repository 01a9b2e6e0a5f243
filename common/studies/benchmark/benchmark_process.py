"""The jobs of a benchmark, each in a new process: step times and memory of a model, or its loss and its errors.

Run as a module, it is that process.
"""

import importlib.util
import math
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from common import cli, data, files, weights
from common import device as devices
from common.errors import RunError
from common.options import Options
from common.precision import Precision
from common.records.fields import Timed
from common.studies import accuracy, job_runner
from common.studies.known_models import Model
from common.timing import benchmark, summarize
from common.training import step as steps
from common.training import version_files

import torch

WARMUP = 3  # training steps before the timed ones
AHEAD = "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama"  # modules that take seconds to import
READY = 4  # processes that import side by side, before the first of them measures
IMPORTED = b"imported\n"
ready: list[subprocess.Popen[bytes]] = []  # those that wait for a job


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(Options):
    """The options of a cell; `batch_sizes` and `seq_lengths` are those of all cells."""

    models: list[str]
    metrics: list[str]
    batch_sizes: list[int]
    seq_lengths: list[int]
    num_steps: int
    repeats: int
    accuracy_steps: int
    timeout: int
    gpus: int


def start(gpu: str | None = None, ahead: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A process that imports what is installed of `ahead`, says IMPORTED, and then does the job on its standard input, if any."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *ahead], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=job_runner.environment(gpu),
    )  # fmt: skip


def run(work: Callable[[], Any], device: str, timeout: int | None, gpu: str | None = None) -> job_runner.Outcome:
    """The outcome of the work in a new process: its status, the reason if it is not "ok", and what `work` returned (`found`).

    On a GPU, processes are started in groups of READY, which import PyTorch and AHEAD before the first of them gets its job: to
    import takes longer than a short job, and beside one that is timed it would take the CPU's time.
    """
    if not gpu and not ready and devices.is_gpu(devices.select(device)):
        ready.extend(start(ahead=AHEAD) for _ in range(READY))
        for each in ready:
            while cast(IO[bytes], each.stdout).readline() not in (IMPORTED, b""):  # b"": it has ended
                pass
    process = start(gpu) if gpu or not ready else ready.pop(0)
    with tempfile.TemporaryDirectory() as folder, process:
        result = Path(folder, "result.json")
        try:
            said, _ = process.communicate(pickle.dumps((work, device, result)), timeout)
        except subprocess.TimeoutExpired:
            return job_runner.timed_out(timeout)
        finally:
            process.kill()
        if result.exists():
            return files.read_json(result)
    if process.returncode == -signal.SIGKILL:
        return {"status": "out of memory", "reason": job_runner.KILLED}
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return {"status": "failed", "reason": last[:500] or f"exit code {process.returncode}"}


def main() -> None:
    """Does, in a process of its own, the job that standard input holds, and writes the outcome."""
    for name in sys.argv[1:]:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if sys.argv[1:]:
        print(f"\n{IMPORTED.decode()}", end="", flush=True)  # on a line of its own, whatever a module has printed
    if not (sent := sys.stdin.buffer.read()):
        return
    work, device, result = pickle.loads(sent)
    outcome: job_runner.Outcome = {"device": devices.describe(devices.select(device)), "environment": devices.environment()}
    try:
        outcome |= {"status": "ok", "reason": None, "found": work()}
    except Exception as error:  # a cell that fails is a result; the others go on
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome |= {"status": "out of memory" if devices.is_out_of_memory(error) else "failed", "reason": said[:500]}
    files.write_json(result, outcome)


def built(model: Model, options: Options) -> tuple[steps.Prepared, Precision]:
    """A new model's training step, checked, and its precision.

    Versions ask PyTorch for deterministic algorithms. External baselines run without them, as their users run them: PyTorch then
    picks faster kernels, such as cuDNN's backward pass of attention.
    """
    version, device = model.load(), devices.select(options.device)
    capture_step = model.captured or None  # None: as the model has it
    settings = replace(version_files.switched(version, options, *model.flags), capture_step=capture_step)
    precision = Precision(device, cli.amp_dtype(options))
    devices.prepare(device, options.seed)
    if not model.path:
        torch.use_deterministic_algorithms(False)
    with device:  # PyTorch draws weights of its own first, of which ours take the place: many seconds of a CPU at large
        made = version.make_model(settings)
    return steps.prepare(version, settings, precision, version_files.random_batch(options, device), model=made), precision


def speed(model: Model, options: BenchmarkOptions) -> Timed:
    """Step times and peak memory, as a `Timed`; the weights are random, and not the seed's."""
    with weights.drawn_on(devices.select(options.device)):
        prepared, precision = built(model, options)
    batch = version_files.random_batch(options, precision.device)
    for _ in range(WARMUP):
        prepared.step(batch)
    devices.synchronize(precision.device)
    devices.reset_peak_memory(precision.device)
    times = benchmark(lambda: prepared.step(batch), precision.device, warmup=1, iterations=options.num_steps)
    found = {"step_ms": summarize(times)} | devices.peak_memory(precision.device, prepared.graph_peak_bytes)
    if reason := getattr(prepared.model, "switches", {}).get("no-kernels"):
        found["no_kernels"] = reason
    return cast(Timed, found)


def errors(model: Model, baseline: Model, options: BenchmarkOptions) -> dict[str, Any]:
    """The loss after `accuracy_steps` training steps, and the errors against float64, as in `Accuracy`."""
    count, (prepared, precision) = options.accuracy_steps, built(model, options)
    source = data.markov(options.model.vocab_size, options.seed)
    batches = data.Batches(source, options.batch_size, options.seq_len, count + 1, options.seed, precision.device)
    loss = [prepared.step(batches[i]) for i in range(count + 1)][-1].item()  # a step returns the loss from before its update
    if not math.isfinite(loss):
        raise RunError(f"the loss after {count} steps is {loss}")
    found = accuracy.errors_against_float64(baseline.load(), model.load(), options, model.flags)
    worst = max((name for name in found if name.startswith("gradient of ")), key=found.__getitem__)
    return {
        "loss": loss, "floor": source.entropy_floor, "logits_error": found["logits"], "gradient_error": found[worst],
        "gradient": worst.removeprefix("gradient of "),
    }  # fmt: skip


if __name__ == "__main__":
    main()

"""The training run that every version is handed to: check, warm up, train, record.

A version is a module with

    TinyLlama(config)                            the model
    make_model(options)                          the model that the flags ask for
    make_optimizer(model, options)               AdamW
    make_step(model, optimizer, precision)       a function of a batch: one training step, which returns its loss

and, where it has any, `SWITCHES` ({name: whether it is on by default}), `MODES` ({name of --mode: function(version, options)}),
`CAPTURED` (whether a step is captured unless the flags say otherwise), `PARALLEL` (the forms of --parallel that it supports, the
default first; all unless given) and `add_arguments(parser)`.

Exit codes are those of `common.cli.command`. Ctrl-C, SIGTERM and SIGHUP end the run after the step in hand. Whatever ends it, the
record of the finished steps is written before anything else, and printed where it cannot be written.
"""

import math
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from common import cli, data, ranks, signals, weights
from common import device as devices
from common.analysis.output import tables
from common.analysis.reports import flop_counts
from common.errors import OutOfMemory, RunError
from common.files import writable_file, writable_folder, write_measurement
from common.precision import Precision
from common.progress import SECONDS, progress
from common.timing import Clock, phase_times, summarize
from common.training import capture, ceilings, checkpoint, distributed, flop_counters, record, setup_check, step
from common.training.profiler import Profiler

import torch
from torch import nn

MODEL_PROFILE = "model_profile.txt"  # DeepSpeed's report, module by module


def main(version: ModuleType, argv: list[str] | None = None) -> None:
    """Parses the command line, trains, and exits the process."""
    options, modes = parser(version).parse_args(argv), getattr(version, "MODES", {})
    action = modes.get(getattr(options, "mode", "train"), lambda version, options: train(version, options).exit_code)
    cli.command(lambda: action(version, distributed.resolve(version, cli.parse(options))))


def parser(version: ModuleType, description: str | None = None) -> cli.Parser:
    """The shared flags, and those that the version adds. The description is the version's unless given."""
    result = cli.parser(description or version.__doc__)
    if hasattr(version, "SWITCHES"):
        cli.add_switches(result, version.SWITCHES)
    if hasattr(version, "MODES") and not description:
        result.add_argument("--mode", choices=("train", *version.MODES), default="train", help="default: train")
    if hasattr(version, "add_arguments"):
        version.add_arguments(result)
    return result


@dataclass
class Result:
    """The measurements of a run, and the files that it wrote.

    Attributes:
        record: schema tiny-llama-run/1.
        metrics: the file that holds it.
        profiles: what the profiler wrote, the profile first; empty without one.
        flops: what --enable-deepspeed-flops wrote, flops_profile.json first.
        exit_code: of a process that ends with this run.
    """

    record: dict[str, Any]
    metrics: Path
    profiles: list[Path]
    flops: list[Path]
    exit_code: int


@distributed.job
def train(version: ModuleType, options: Namespace) -> Result:
    """One training run and everything that was asked to be measured about it; of several processes the first writes it all.

    Raises:
        UsageError: the options do not fit this machine or data.
        RunError: a parameter gets no gradient, the loss is not finite, or memory ran out.
    """
    here, device = ranks.here(), devices.select(options.device)
    metrics_path = options.metrics_out or Path(f"metrics_{record.name(version)}.json")
    if here.main_process:
        writable_file(metrics_path, "--metrics-out")
        if options.save_model:
            writable_folder(options.save_model, "--save-model")
        if options.checkpoint_dir:
            checkpoint.check_folder(options)
    options.capture_step = capture.wanted(version, options, device)
    distributed.start(options, device)  # from here on `cuda` is this process's GPU
    devices.prepare(device, options.seed, options.allow_tf32)
    devices.limit_memory(device, devices.describe(device)["memory_mib"])
    precision = Precision(device, cli.amp_dtype(options))
    if options.parallel in (None, "ddp"):  # the other forms share out what a process alone would hold
        setup_check.memory(options, device)
    with out_of_memory_explained(options):
        dataset = data.load(options.data, options.model.vocab_size, options.seed)
        shape = options.batch_size, options.seq_len, options.num_steps
        batches = data.Batches(dataset, *shape, options.seed, device, here.rank, here.world_size)
    saves = checkpoint.Checkpoints(options, checkpoint.inputs(record.name(version), options, precision, dataset))
    remaining = Namespace(**vars(options) | {"num_steps": options.num_steps - saves.first})
    profiler = Profiler(remaining, device) if options.enable_pytorch_profiler else None
    if options.validate_setup:
        setup_check.before(device, dataset)
    if here.main_process and options.enable_deepspeed_flops:
        writable_folder(options.flops_dir, "--flops-dir")

    peaks = counted = None
    try:
        with out_of_memory_explained(options):
            peaks = ceilings.measure(device, precision) if here.main_process and (options.measure_peak or profiler) else None
            with progress("warming up; where kernels are compiled, the first time takes about a minute"):
                prepared = step.prepare(version, options, precision, batches[0], options.warmup_steps, profiler)
            counting = here.main_process and options.enable_deepspeed_flops
            report = options.flops_dir / MODEL_PROFILE
            counted = flop_counters.count(prepared.model, batches[0], report) if counting else None
            saves.load(prepared, precision)
    except OutOfMemory as error:
        prepared, ended = None, error
    with signals.postponed():
        if prepared:
            model, outcome = prepared.model, loop(prepared, batches, device, options, profiler, saves)
        else:
            model, outcome = without_memory(version, options), Outcome(memory=devices.peak_memory(device), error=ended)
        measured = dataset, outcome, profiler, peaks, saves.first + 1
        result = record.build(version, options, model, device, precision, *measured)
        if here.main_process:
            write_measurement(metrics_path, result, "--metrics-out")
    if distributed.active() and outcome.status == "completed":
        result["ranks"] = compared_ranks(prepared.model, batches[0], precision, result)
        if here.main_process:
            write_measurement(metrics_path, result, "--metrics-out")
    print(record.summary(result))
    print(f"  metrics      {metrics_path}")
    if outcome.error:
        raise outcome.error
    if options.save_model:
        distributed.gather_weights(prepared.optimizer)
        state = distributed.whole(weights.baseline_state_dict(prepared.model))
        if here.main_process:
            checkpoint.save(options.save_model, state, options.model, dataset)
        print(f"  checkpoint   {options.save_model}")
    if options.time_phases and outcome.status == "completed":
        with out_of_memory_explained(options):
            times = phase_times(lambda i: prepared.step(batches[i]), device)
        result["phases_ms"] = {phase: summarize(values) for phase, values in times.items()}
        print(record.phases(result))
        if here.main_process:
            write_measurement(metrics_path, result, "--metrics-out")
    flops = flop_counts.write(options.flops_dir, counted, result) if counted else []
    for path in flops:
        print(f"  flops        {path}")
    profiles = profiler.write(result) if profiler else []
    for path in profiles:
        print(f"  profile      {path}")
    if here.main_process and options.validate_setup:
        setup_check.after(result, metrics_path, profiles)
    return Result(result, metrics_path, profiles, flops, 128 + outcome.signal if outcome.signal else 0)


@dataclass
class Outcome:
    """The measurements of the training loop up to its end, however it ended."""

    losses: list[float] = field(default_factory=list)  # nats per token, from before each finished step
    step_ms: list[float] = field(default_factory=list)  # of each finished step
    memory: dict = field(default_factory=dict)
    signal: int | None = None
    error: BaseException | None = None  # what else ended it

    @property
    def status(self) -> str:
        if self.error and not isinstance(self.error, KeyboardInterrupt | BrokenPipeError):
            return f"failed: {first_line(self.error)}"
        return "interrupted" if self.signal or self.error else "completed"


def first_line(error: BaseException) -> str:
    """The first line of the message, or the error's name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def compared_ranks(model: nn.Module, batch: tuple, precision: Precision, result: dict[str, Any]) -> dict[str, list[float]]:
    """Times and memory of every process, by rank. Names the ranks for which the others wait."""
    mine = distributed.forward_ms(model, batch, precision), result["step_ms"]["median"], result["memory"]["peak_mib"]
    columns = zip(*distributed.gathered(mine), strict=True)
    found = {name: list(values) for name, values in zip(("forward_ms", "step_ms", "peak_mib"), columns, strict=True)}
    for line in distributed.slow_ranks(found["forward_ms"]):
        print(line)
    return found


def loop(
    prepared: step.Prepared, batches: data.Batches, device: torch.device, options: Namespace, profiler,
    saves: checkpoint.Checkpoints,
) -> Outcome:  # fmt: skip
    """Trains up to step `options.num_steps`, from the first or from the one after a checkpoint.

    The host waits for the device only where a line is printed or a checkpoint written, between two steps. Losses are means over
    all processes. It raises nothing: an error is part of the outcome.
    """
    outcome, finished, spoken = Outcome(), 0, time.monotonic()
    meetings, number = distributed.Meetings(device), 0
    tokens = ranks.here().world_size * options.batch_size * options.seq_len
    first, count = saves.first, options.num_steps - saves.first
    clock, losses = Clock(device), torch.empty(count, device=device)
    devices.reset_peak_memory(device)

    def catch_up() -> None:
        """Reads what the device has finished; stops at a loss that is not a number."""
        outcome.losses += distributed.mean(losses[len(outcome.losses) : finished]).tolist()
        timed = len(outcome.step_ms)
        bad = next((i for i in range(timed, finished) if not math.isfinite(outcome.losses[i])), None)
        outcome.step_ms += [clock.milliseconds(2 * i, 2 * i + 1) for i in range(timed, finished if bad is None else bad)]
        if bad is not None:
            loss = outcome.losses[bad]
            del outcome.losses[bad:]
            message = f"the loss is {loss} at step {first + bad + 1}: lower --learning-rate (now {options.learning_rate})"
            raise RunError(message, shared=True)

    def log(since: int) -> None:
        median = summarize(outcome.step_ms[since:])["median"]
        print(
            f"step {first + finished:5d}/{options.num_steps}  loss {outcome.losses[-1]:7.4f}  "
            f"{tables.format_time(median):>9} a step  "
            f"{tokens / median * 1e3:11,.0f} tokens/s",
            flush=True,
        )

    if profiler:
        profiler.start()
    with signals.deferred() as received:
        try:
            with out_of_memory_explained(options), distributed.waiting_explained(options), ExitStack() as at_the_end:
                at_the_end.enter_context(meetings.watched(options))
                if not distributed.active():
                    at_the_end.callback(catch_up)  # also what was finished before an error
                if profiler:
                    at_the_end.callback(profiler.stop)
                distributed.wait_for_all()
                for i in range(count):
                    batch = batches[first + i]
                    clock.mark()
                    losses[i] = prepared.step(batch)
                    clock.mark()
                    finished = i + 1
                    number, silent = meetings.agree(finished, received[0] if received else 0, time.monotonic() - spoken)
                    stopping = number > 0
                    if profiler and stopping:
                        profiler.stop()  # before what follows could count as a further step
                    elif profiler:
                        profiler.step(finished)
                    ending = stopping or finished == count
                    due = (first + finished) % options.log_every == 0 or silent > SECONDS
                    saving = saves.due(first + finished, ending)
                    if ending or due or saving:
                        since, spoken = len(outcome.losses), time.monotonic()
                        catch_up()
                        log(since)
                    if saving:
                        saves.save(first + finished)
                    if stopping:
                        break
        except RunError as error:
            outcome.error = error
        except RuntimeError as error:  # PyTorch's: a number out of range, a device that has failed
            outcome.error = RunError(f"step {first + finished + 1} failed: {first_line(error)}")
        except BaseException as error:
            outcome.error = error
    outcome.signal = number if number and finished < count else None  # or nothing was left to interrupt
    outcome.memory = devices.peak_memory(device, prepared.graph_peak_bytes)
    return outcome


def without_memory(version: ModuleType, options: Namespace) -> nn.Module:
    """The version's model without numbers in it: what the record of a run says about a model that did not fit."""
    with torch.device("meta"):
        return version.make_model(options)


@contextmanager
def out_of_memory_explained(options: Namespace) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory: lower --batch-size or --seq-len (now {options.batch_size} and {options.seq_len}), "
            "take a smaller --preset, or try --use-amp"
        ) from error

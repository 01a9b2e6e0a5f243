"""A training run: the context in which the loop of a version's script stands (`train` in each).

Exit codes are those of `common.cli.command`. Ctrl-C, SIGTERM and SIGHUP end the run after the step in hand. Whatever ends it, the
record of the finished steps is written before anything else, and printed where it cannot be written.
"""

import hashlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from common import ROOT, cli, data, ranks, schedule, signals, spans
from common import device as devices
from common.errors import OutOfMemory, RunError, first_line
from common.files import writable_file, write_measurement
from common.options import Options, RunOptions
from common.precision import Precision
from common.progress import SECONDS, duration, progress
from common.records.fields import Ceilings
from common.records.run_record import RunRecord, TimedRun
from common.terminal import Line, format_time
from common.timing import Clock, benchmark, summarize
from common.training import capture, checkpoint, distributed, step
from common.training.capture import Batch, CapturedStep, Step

import torch
from torch import Tensor

if TYPE_CHECKING:
    from common.training.profiler import Profiler

UNREAD = 2**16  # steps whose losses may stay on the device
FASTER = 1.5  # times, for a line that says so
CODE = ("common/**/*.py", "version*/*.py", "version*/kernels/*.py")
OWN = {  # options that processes may have each for itself: files of the first one, and what is compared under another name
    "config", "data", "device", "distributed_timeout", "flops_dir", "measure_peak", "metrics_out", "model", "profile_dir",
    "save_model", "sort_by", "switches", "validate_setup",
}  # fmt: skip


@dataclass
class Outcome:
    """The measurements of the training loop up to its end, however it ended."""

    losses: list[float] = field(default_factory=list)  # nats per token, from before each finished step
    step_ms: list[float] = field(default_factory=list)  # of each finished step
    memory: dict[str, Any] = field(default_factory=dict)
    signal: int | None = None
    error: BaseException | None = None  # what else ended it
    own_from: int | None = None  # index of the first loss that is this process's alone, as another has ended

    @property
    def status(self) -> str:
        if self.error and not isinstance(self.error, KeyboardInterrupt | BrokenPipeError):
            return f"failed: {first_line(self.error, type(self.error).__name__)}"
        return "interrupted" if self.signal or self.error else "completed"


def code_sha256() -> str:
    """Of the script that runs, and of the files that runs of this clone are made of."""
    digest = hashlib.sha256(Path(sys.argv[0]).read_bytes())
    for path in sorted(path for pattern in CODE for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Run:
    """One training run and everything that was asked to be measured about it; of several processes the first writes it all.

    The host waits for the device only between two steps, where a line is printed, a checkpoint written, or processes meet. Losses
    are means over all processes; the last ones are the first's own if another dies.

    Attributes:
        options: those given, with the form of --parallel and whether the step is captured.
        device, precision: of the run.
        record: schema tiny-llama-run/1, at the end of the run.
        metrics: the file that holds it.
        profiles: what the profiler wrote, the profile first; empty without one.
        flops: what --enable-deepspeed-flops wrote, flops_profile.json first.

    UsageError: the options do not fit this machine or data. RunError: a parameter gets no gradient, the loss is not finite, or
    memory ran out.
    """

    precision: Precision
    record: RunRecord | TimedRun

    def __init__(self, options: RunOptions, name: str, captured: bool = False, forms: Sequence[str] = ranks.FORMS) -> None:
        """
        Args:
            name: in the record, unless the options have one.
            captured: whether the step is captured where the flags leave it open.
            forms: of --parallel that the version supports, the default first.
        """
        self.name, self.device, form = options.name or name, devices.select(options.device), distributed.form(options, forms)
        default = captured and form != "fsdp" and not options.time_phases
        wanted = capture.wanted(options.capture_step, default, self.device)
        self.options = replace(options, parallel=form, capture_step=wanted)
        self.metrics = options.metrics_out or Path(f"metrics_{self.name}.json")
        self.outcome, self.finished, self.ending, self.started = Outcome(), 0, False, False
        self.profiles: list[Path] = []
        self.flops: list[Path] = []
        self.model: torch.nn.Module | None = None
        self.prepared: step.Prepared | None = None
        self.ceilings: Ceilings | None = None
        self.counted: dict[str, dict[str, int]] | None = None
        self.profiler: Profiler | None = None
        self._loop, self._signals, self._warm_up = ExitStack(), ExitStack(), ExitStack()

    @property
    def exit_code(self) -> int:
        """Of a process that ends with this run."""
        return 128 + self.outcome.signal if self.outcome.signal else 0

    # ------------------------------------------------------------------------------------------------- before the loop

    def __enter__(self) -> "Run":
        options, here, device = self.options, ranks.here(), self.device
        self._captured = bool(options.capture_step)
        with ExitStack() as stack, distributed.waiting_explained(options.distributed_timeout):
            stack.enter_context(distributed.first_alone_prints())
            if here.main_process:
                writable_file(self.metrics, "--metrics-out")
                if options.save_model:
                    for name in checkpoint.SAVED:
                        writable_file(options.save_model / name, "--save-model")
                if options.checkpoint_dir:
                    stack.enter_context(checkpoint.taken(options.checkpoint_dir, options.resume))
            if self._captured:
                capture.check_supported(device, options.switches.get("torch-compile"), options.parallel)
            distributed.start(options.parallel, device, options.distributed_timeout, self._captured)  # `cuda`: this process's GPU
            self._announce_form()
            self.load, self.cores = devices.load()  # of other work, before there is any here
            devices.prepare(device, options.seed, options.allow_tf32)
            devices.limit_memory(device, devices.describe(device)["memory_mib"])
            self.precision = Precision(device, cli.amp_dtype(options))
            with out_of_memory_explained(options):
                self.dataset = data.load(options.data, options.model.vocab_size, options.seed)
                if distributed.active():
                    distributed.require_equal(self._inputs())
                shape = options.batch_size, options.seq_len, options.num_steps
                self.data = data.Batches(self.dataset, *shape, options.seed, device, here.rank, here.world_size)
            inputs = checkpoint.inputs(self.name, options, self.precision, self.dataset)
            self.saves = checkpoint.Checkpoints(options, inputs)
            self.count = options.num_steps - self.saves.first  # steps of this run
            self._start_what_flags_ask_for()
            stack.enter_context(self._warm_up)
            compiled = "; where kernels are compiled, the first time takes about a minute" * devices.is_gpu(device)
            self._warm_up.enter_context(progress(f"warming up{compiled}"))
            self._everything = stack.pop_all()
        return self

    def _start_what_flags_ask_for(self) -> None:
        """A run without these flags does not import what they need."""
        options = self.options
        if options.enable_pytorch_profiler:
            from common.training.profiler import Profiler

            self.profiler = Profiler(replace(options, num_steps=self.count), self.device)
        if options.enable_deepspeed_flops and ranks.here().main_process:
            writable_file(options.flops_dir / "flops_profile.json", "--flops-dir")
        if options.validate_setup:
            from common.training import record

            record.print_setup(self.device, self.dataset)

    def _inputs(self) -> dict[str, object]:
        """What all processes must have alike, by its name in a message: the code, the options and the tokens."""
        options, flags = self.options, cli.OVERRIDES["model"]
        given = {f"--{name.replace('_', '-')}": value for name, value in vars(options).items() if name not in OWN}
        given |= {f"--{flags.get(name, name).replace('_', '-')}": value for name, value in options.model}
        given |= {f"--enable-{name}": value for name, value in options.switches.items()}
        given["--save-model"], tokens = bool(options.save_model), hashlib.sha256(self.dataset.tokens.data).hexdigest()
        code = {"the version": self.name, "the release of PyTorch": torch.__version__, "the code's sha256": code_sha256()}
        return {**code, **given, "sha256 of --data's tokens": tokens}

    def _announce_form(self) -> None:
        if form := self.options.parallel:
            batch, world_size = self.options.batch_size, ranks.here().world_size
            processes = f"{form} on {world_size} processes ({torch.distributed.get_backend()})"
            print(f"{processes}: batch {world_size} x {batch} = {world_size * batch} sequences a step", flush=True)

    def place(self, model: distributed.Model) -> distributed.Model:
        """The model on its device and, of several processes, in the form that a step calls; before its optimizer is made."""
        self.model = model
        if distributed.active():
            shapes = {f"the shape of {name}": tuple(weight.shape) for name, weight in model.named_parameters()}
            distributed.require_equal(shapes)
        if ranks.here().main_process and (self.options.measure_peak or self.profiler):
            from common.training import ceilings

            self.ceilings = ceilings.measure(self.device, self.precision)
        return step.place(model, self.device, self.options.parallel, self._captured)

    def adapt(self, optimizer: distributed.Optimizer) -> distributed.Optimizer:
        """The optimizer, not stepped yet, in the form that a captured step or several processes need."""
        adapted = step.adapt(optimizer, self.precision, self.options.parallel, self._captured)
        self.optimizer: torch.optim.Optimizer = adapted
        return adapted

    def prepare(self, made: Step) -> Step:
        """The step that trains: its gradients are checked, it is warmed up and, where asked for, captured as a graph.

        Weights and states are those of the beginning afterwards, or those of the checkpoint that the run goes on from.
        """
        options = self.options
        assert self.model is not None
        if schedule.changes(options) and self._captured:
            schedule.move_rate(self.optimizer, self.device)
        self.prepared = step.ready(
            step.Prepared(self.model, self.optimizer, made), self.precision, self.data[0], options.warmup_steps, options.parallel,
            self._captured, self.profiler, options.check_gradients,
        )  # fmt: skip
        if ranks.here().main_process and options.enable_deepspeed_flops:
            from common.training import flop_counters

            self.counted = flop_counters.count(self.model, self.data[0], options.flops_dir)
        threads, busy = torch.get_num_threads(), self.load + torch.get_num_threads() > self.cores + 0.5
        elsewhere = devices.is_gpu(self.device) or distributed.active() or options.switches.get("torch-compile")
        if busy and threads > 1 and not elsewhere:
            self._try_fewer(threads, threads // 2)
        self.saves.load(self.prepared, self.precision)
        self._warm_up.close()
        return self.prepared.step

    def _try_fewer(self, threads: int, fewer: int) -> None:
        """Says so if fewer threads make a step much faster, as they do where the threads wait for each other to get a core."""
        assert self.prepared is not None
        train, batch, times = self.prepared.step, self.data[0], []
        with step.without_update(self.optimizer, self.precision):
            for number in (threads, fewer):
                torch.set_num_threads(number)
                times += benchmark(lambda: train(batch), self.device, warmup=0, iterations=1)
        torch.set_num_threads(threads)
        if times[0] > FASTER * times[1]:
            now, then = map(format_time, times)
            print(f"other work takes the cores: a step takes {now} here, {then} with OMP_NUM_THREADS={fewer}", flush=True)

    # --------------------------------------------------------------------------------------------------------- the loop

    def batches(self) -> Iterator[Batch]:
        """The batch of each step up to --num-steps, until a signal ends the run, or all processes agree to stop."""
        self._begin()
        for i in range(self.count):
            batch = self.data[self.saves.first + i]
            self.clock.mark()
            if schedule.changes(self.options):
                schedule.set_rate(self.optimizer, schedule.learning_rate(self.options, self.saves.first + i))
            yield batch
            if self.ending:
                break

    def _begin(self) -> None:
        self.clock, self.losses = Clock(self.device), torch.empty(min(self.count, UNREAD), device=self.device)
        self.meetings, self.spoken, self.number = distributed.Meetings(self.device), time.monotonic(), 0
        self.line = Line(sys.stdout)
        devices.reset_peak_memory(self.device)
        self._signals.enter_context(signals.postponed())
        if self.profiler:
            self.profiler.start()
        self.started = True
        self.received = self._loop.enter_context(signals.deferred())
        self._loop.callback(self.line.end)
        self._loop.enter_context(self.meetings.watched(self._captured, self.options.distributed_timeout))
        self._loop.callback(self._catch_up, alone=True)  # also what was finished before an error
        if self.profiler:
            self._loop.callback(self.profiler.stop)
        distributed.wait_for_all()

    def did(self, loss: Tensor) -> None:
        """Ends a step: takes its time and its loss, and prints, saves and meets the other processes where that is due."""
        self.losses[self.finished - len(self.outcome.losses)] = loss  # copied: a captured step overwrites it
        self.clock.mark()
        self.finished += 1
        finished, options = self.saves.first + self.finished, self.options
        signal = self.received[0] if self.received else 0
        self.number, silent = self.meetings.agree(self.finished, signal, time.monotonic() - self.spoken)
        if self.profiler and self.number:
            self.profiler.stop()  # before what follows could count as a further step
        elif self.profiler:
            self.profiler.step(self.finished)
        self.ending = self.number > 0 or self.finished == self.count
        profiled = spans.recording and not self.ending  # then to save would be part of the profiled step
        saving = self.saves.due(finished, self.ending) and not profiled
        full = self.finished - len(self.outcome.losses) == UNREAD
        if self.ending or saving or finished % options.log_every == 0 or silent > SECONDS or full:
            since, self.spoken = len(self.outcome.losses), time.monotonic()
            self._catch_up()
            self._log(since)
        if saving:
            with self.meetings.paused():
                self.saves.save(finished)

    def _catch_up(self, alone: bool = False) -> None:
        """Reads what the device has finished, without the others if `alone`; RunError: a loss is not a number."""
        outcome, timed = self.outcome, len(self.outcome.step_ms)
        losses = self.losses[: self.finished - len(outcome.losses)].clone()
        if alone and distributed.active():
            outcome.own_from = len(outcome.losses)
        outcome.losses += (losses if alone else distributed.mean(losses)).tolist()
        bad = next((i for i in range(timed, self.finished) if not math.isfinite(outcome.losses[i])), None)
        read = self.finished if bad is None else bad
        outcome.step_ms += [self.clock.milliseconds(2 * i, 2 * i + 1) for i in range(timed, read)]
        if bad is not None:
            loss, number = outcome.losses[bad], self.saves.first + bad + 1
            del outcome.losses[bad:]
            advice = f"lower --learning-rate (now {self.options.learning_rate})"
            if self.saves.source and not outcome.losses:
                advice = f"remove {self.saves.source}, and go on from the one before it with a lower --learning-rate"
            raise RunError(f"the loss is {loss} at step {number}: {advice}", shared=not alone)

    def _log(self, since: int) -> None:
        median, options = summarize(self.outcome.step_ms[since:])["median"], self.options
        tokens = ranks.here().world_size * options.batch_size * options.seq_len
        left = math.ceil(median / 1e3 * (self.count - self.finished))
        self.line.show(
            f"step {self.saves.first + self.finished:5d}/{options.num_steps}  loss {self.outcome.losses[-1]:7.4f}  "
            f"{format_time(median):>9} a step  {tokens / median * 1e3:11,.0f} tokens/s"
            f"{f'  {duration(left):>6} left' if left else ''}"
        )

    # --------------------------------------------------------------------------------------------------------- its end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._everything, distributed.waiting_explained(self.options.distributed_timeout):
            ended = self._ended(error)
            if self.started or (isinstance(ended, OutOfMemory) and self.model):
                with self._signals if self.started else signals.postponed():
                    self._record(ended)
                if distributed.active() and self.outcome.status == "completed":
                    self.amend(ranks=self._compared_ranks())
                from common.training import ending

                with out_of_memory_explained(self.options):
                    ending.report(self, ended)
            if ended and ended is not error:
                raise ended
            if not error:
                if self.outcome.signal:  # then torchrun ends all processes as soon as one has ended
                    distributed.wait_for_all()
                if distributed.active() and self.prepared and isinstance(self.prepared.step, CapturedStep):
                    self.prepared.step.release()
                distributed.end()

    def _ended(self, error: BaseException | None) -> BaseException | None:
        """The error that ended the run, in the words of a user where it is one of memory, of another process, or of PyTorch."""
        try:
            with (
                out_of_memory_explained(self.options),
                distributed.waiting_explained(self.options.distributed_timeout),
                self._loop,
            ):
                if error:
                    raise error
        except RunError as found:
            return found
        except RuntimeError as found:  # PyTorch's: a number out of range, a device that has failed
            if not self.started:
                return found
            return RunError(f"step {self.saves.first + self.finished + 1} failed: {first_line(found, type(found).__name__)}")
        except BaseException as found:
            return found
        return None

    def _record(self, ended: BaseException | None) -> None:
        """Builds the record and writes it, before anything that could fail."""
        from common.training import record

        outcome, model = self.outcome, self.model
        assert model is not None
        outcome.error = ended
        if self.started and self.number and self.finished < self.count:  # or nothing was left to interrupt
            outcome.signal = self.number
        outcome.memory = devices.peak_memory(self.device, self.prepared.graph_peak_bytes if self.prepared else 0)
        self.record = record.build(
            self.name, self.options, model, self.device, self.precision, self.dataset, outcome, self.profiler, self.ceilings,
            self.saves.first + 1,
        )  # fmt: skip
        self.amend()

    def amend(self, **sections: object) -> None:
        """Adds sections to the record, and writes it."""
        self.record = cast(TimedRun, {**self.record, **sections})
        if ranks.here().main_process:
            write_measurement(self.metrics, self.record, "--metrics-out")

    def _compared_ranks(self) -> dict[str, list[float]]:
        """Times and memory of every process, by rank. Names the ranks for which the others wait."""
        assert self.model is not None
        forward = distributed.forward_ms(self.model, self.data[0], self.precision)
        timed = cast(TimedRun, self.record)
        mine = forward, timed["step_ms"]["median"], timed["memory"]["peak_mib"]
        columns = zip(*distributed.gathered(mine), strict=True)
        found = {name: list(values) for name, values in zip(("forward_ms", "step_ms", "peak_mib"), columns, strict=True)}
        for line in distributed.slow_ranks(found["forward_ms"]):
            print(line)
        return found


@contextmanager
def out_of_memory_explained(options: Options) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory: lower --batch-size or --seq-len (now {options.batch_size} and {options.seq_len}), "
            "take a smaller --preset, or try --use-amp"
        ) from error

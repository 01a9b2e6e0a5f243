"""A training run: the context in which the loop of a version's script stands (`train` in each).

Exit codes are those of `common.cli.command`. Ctrl-C, SIGTERM and SIGHUP end the run after the step
in hand. Whatever ends it, the record of the finished steps is written before anything else, and
printed where it cannot be written. What only a flag or torchrun asks for is imported where it is
used.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from common import data, ranks, signals, spans
from common import device as devices
from common.options import Options, RunOptions
from common.precision import Precision, amp_dtype
from common.timing import Clock, summarize
from common.training import agreement, capture, preparation
from common.training.capture import CapturedStep, Model, Optimizer, Step
from tracepage.errors import RunError, UsageError, first_line
from tracepage.files import writable_file, writable_folder, write_measurement
from tracepage.terminal import Line, duration, format_time, progress

import torch
from torch import Tensor

if TYPE_CHECKING:
    from common.training import checkpoint
    from common.training.profiler import Profiler
    from tracepage.records.fields import Ceilings
    from tracepage.records.run_record import RunRecord, TimedRun


@dataclass
class Outcome:
    """The measurements of the training loop up to its end, however it ended."""

    # nats per token, from before each finished step
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)  # of each finished step
    memory: dict[str, Any] = field(default_factory=dict)
    signal: int | None = None
    error: BaseException | None = None  # what else ended it
    # index of the first loss that is this process's alone, as another has ended
    own_from: int | None = None

    @property
    def status(self) -> str:
        if self.error and not isinstance(self.error, KeyboardInterrupt | BrokenPipeError):
            return f"failed: {first_line(self.error, type(self.error).__name__)}"
        return "interrupted" if self.signal or self.error else "completed"


class Run:
    """One training run and everything that was asked to be measured about it; of several processes
    the first writes it all.

    The host waits for the device only between two steps, where a line is printed, a checkpoint
    written, or processes meet. Losses are means over all processes; the last ones are the first's
    own if another dies.

    Attributes:
        options: those given, with the run's name, the form of --parallel and whether the step is
        captured. device, precision: of the run. record: schema tiny-llama-run/1, at the end of the
        run. metrics: the file that holds it. profiles: what the profiler wrote, the profile first;
        empty without one. flops: what --enable-deepspeed-flops wrote, flops_profile.json first.

    UsageError: the options do not fit this machine or data. RunError: a parameter gets no gradient,
    the loss is not finite, or memory ran out.
    """

    precision: Precision
    record: "RunRecord | TimedRun"

    def __init__(
        self,
        options: RunOptions,
        name: str,
        captured: bool = False,
        forms: Sequence[str] = ranks.FORMS,
    ) -> None:
        """
        Args:
            name: in the record, unless the options have one.
            captured: whether the step is captured where the flags leave it open.
            forms: of --parallel that the version supports, the default first.
        """
        form = None
        self.device = devices.select(options.device)
        if ranks.here().launched:
            from common.training import distributed

            form = distributed.form(options, forms)
        default = captured and form != "fsdp" and not options.time_phases
        wanted = capture.wanted(options.capture_step, default, self.device)
        self.options = replace(
            options, name=options.name or name, parallel=form, capture_step=wanted
        )
        self.metrics = options.metrics_out or Path(f"metrics_{self.options.name}.json")
        self.outcome = Outcome()
        self.steps_done = 0
        self.loop_ends = False
        self.loop_begun = False
        self.scheduled = options.lr_schedule != "constant" or options.lr_warmup_steps > 0
        self.steps_before = 0  # those of the checkpoint that the run goes on from
        self.profiles: list[Path] = []
        self.flops: list[Path] = []
        self.model: torch.nn.Module | None = None
        self.prepared: preparation.Prepared | None = None
        self.saves: checkpoint.Checkpoints | None = None
        self.meetings: distributed.Meetings | None = None
        self.held_out: data.Batches | None = None
        self.profiler: Profiler | None = None
        self.ceilings: Ceilings | None = None
        self.flop_counts: dict[str, dict[str, int]] | None = None
        self._loop = ExitStack()
        self._signals = ExitStack()
        self._progress = ExitStack()

    @property
    def exit_code(self) -> int:
        """Of a process that ends with this run."""
        return 128 + self.outcome.signal if self.outcome.signal else 0

    # ------------------------------------------------------------------------------------------------- before the loop

    def __enter__(self) -> "Run":
        options = self.options
        device = self.device
        if ranks.here().main_process:
            writable_file(self.metrics, "--metrics-out", (Path(options.data), options.config))
            if options.memory_snapshot:
                writable_file(options.memory_snapshot.with_suffix(".json"), "--memory-snapshot")
            if options.save_model:
                writable_folder(options.save_model, "--save-model")
            if options.enable_deepspeed_flops:
                writable_folder(options.flops_dir, "--flops-dir")
        if options.capture_step:
            capture.check_supported(device, options.switches.get("torch-compile"))
        if options.memory_snapshot and not devices.is_gpu(device):
            raise UsageError(
                "--memory-snapshot needs a GPU: the allocator of a CPU keeps no history"
            )
        with ExitStack() as stack:
            stack.enter_context(explained(options))
            if options.parallel:
                from common.training import distributed

                # from here on `cuda` is this process's GPU
                stack.enter_context(distributed.joined(options, device))
                self.meetings = distributed.Meetings(device)
            devices.configure(device, options.seed, options.allow_tf32)
            devices.limit_memory(device, devices.describe(device)["memory_mib"])
            self.precision = Precision(device, amp_dtype(options))
            self.dataset = data.load(options.data, options.model.vocab_size, options.seed)
            sizes = options.batch_size, options.seq_len, options.num_steps
            if options.eval_steps:
                self.dataset, held_out = data.split(self.dataset)
                self.held_out = data.Batches(
                    held_out, (*sizes[:2], options.eval_steps), 0, device, ranks.here()
                )
            self.data = data.Batches(self.dataset, sizes, options.seed, device, ranks.here())
            if len({*agreement.gathered(self.dataset.sha256)}) > 1:
                raise UsageError(
                    "--data is another text for another process: give all the same", shared=True
                )
            if options.checkpoint_dir:
                from common.training import checkpoint

                self.saves = checkpoint.Checkpoints(options, self.precision, self.dataset)
                self.steps_before = self.saves.steps_before
            self.steps_planned = options.num_steps - self.steps_before
            if options.enable_pytorch_profiler:
                from common.training.profiler import Profiler

                self.profiler = Profiler(replace(options, num_steps=self.steps_planned), device)
            if options.validate_setup:
                from common.training import record

                record.print_setup(device, self.dataset)
            compiled = (
                "; where kernels are compiled, the first time takes about a minute"
                * devices.is_gpu(device)
            )
            self._progress.enter_context(progress(f"warming up{compiled}"))
            stack.enter_context(self._progress)
            self._everything = stack.pop_all()
        return self

    def place(self, model: Model) -> Model:
        """The model on its device and, of several processes, in the form that a step calls; before
        its optimizer is made.
        """
        self.model = model
        if ranks.here().main_process and (self.options.measure_peak or self.profiler):
            from common.training import ceilings

            self.ceilings = ceilings.measure(self.device, self.precision)
        captured = bool(self.options.capture_step)
        checkpointed = self.options.checkpoint_activations
        return preparation.place(model, self.device, self.options.parallel, captured, checkpointed)

    def adapt(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, not stepped yet, in the form that a captured step or several processes
        need.
        """
        adapted = preparation.adapt(
            optimizer, self.precision, self.options.parallel, bool(self.options.capture_step)
        )
        self.optimizer: torch.optim.Optimizer = adapted
        return adapted

    def prepare(self, made: Step) -> Step:
        """The step that trains: its gradients are checked, it is warmed up and, where asked for,
        captured as a graph.

        Weights and states are those of the beginning afterwards, or those of the checkpoint that
        the run goes on from.
        """
        options = self.options
        batch = self.data[0]
        assert self.model is not None
        if self.scheduled and options.capture_step:
            from common import schedule

            schedule.move_rate(self.optimizer, self.device)
        prepared = preparation.Prepared(self.model, self.optimizer, made)
        passes = options.warmup_steps
        preparation.warm_up(
            prepared,
            self.precision,
            batch,
            passes=passes,
            form=options.parallel,
            check=options.check_gradients,
        )
        if options.memory_snapshot:
            from common import memory_snapshot
            from common.training import record

            first = record.header(
                memory_snapshot.SCHEMA, self.device, self.precision.name, model=options.model
            )
            with preparation.without_update(self.optimizer, self.precision):
                memory_snapshot.take(
                    options.memory_snapshot, lambda: made(batch), first, ranks.here().main_process
                )
        if options.capture_step:
            if self.profiler:
                with preparation.without_update(self.optimizer, self.precision):
                    self.profiler.record_eager(lambda: made(batch))
            prepared = preparation.captured_step(prepared, self.precision, batch)
        if ranks.here().main_process and options.enable_deepspeed_flops:
            from common.training import flop_counters

            self.flop_counts = flop_counters.count(self.model, batch, options.flops_dir)
        if self.saves:
            self.saves.load(prepared)
        self.prepared = prepared
        self._progress.close()
        return prepared.step

    # --------------------------------------------------------------------------------------------------------- the loop

    def steps(self) -> Iterator[int]:
        """The number of each step up to --num-steps, until a signal ends the run, or all processes
        agree to stop.
        """
        if self.scheduled:
            from common import schedule
        self._begin()
        for number in range(self.steps_before, self.options.num_steps):
            if self.scheduled:
                schedule.set_rate(self.optimizer, schedule.learning_rate(self.options, number))
            yield number
            if self.loop_ends:
                break

    def _begin(self) -> None:
        self.clock, self.losses = (
            Clock(self.device),
            torch.empty(self.steps_planned, device=self.device),
        )
        self.signal = 0
        self.line = Line(sys.stdout)
        devices.reset_peak_memory(self.device)
        self._signals.enter_context(signals.postponed())
        if self.profiler:
            self.profiler.start()
        self.loop_begun = True
        self.signals_received = self._loop.enter_context(signals.deferred())
        self._loop.callback(self.line.end)
        if self.meetings:
            timeout = self.options.distributed_timeout
            captured = bool(self.options.capture_step)
            self._loop.enter_context(self.meetings.watched(self._keep, timeout, captured))
        self._loop.callback(self._catch_up, alone=True)  # also what was finished before an error
        if self.profiler:
            self._loop.callback(self.profiler.stop)
        agreement.wait_for_all()

    def finished(self, loss: Tensor) -> None:
        """After a step: keeps its loss on the device, and prints, saves and meets the other
        processes where that is due.
        """
        self.losses[self.steps_done] = loss  # copied: a captured step overwrites it
        self.steps_done += 1
        self.signal = self.signals_received[0] if self.signals_received else 0
        if self.meetings:
            self.signal = self.meetings.agree(self.steps_done, self.signal)
        if self.profiler and self.signal:
            self.profiler.stop()  # before what follows could count as a further step
        elif self.profiler:
            self.profiler.step(self.steps_done)
        self.loop_ends = self.signal > 0 or self.steps_done == self.steps_planned
        step = self.steps_before + self.steps_done
        every = self.options.checkpoint_every
        # or it would be part of a profiled step
        due = every and step % every == 0 and not spans.recording
        saving = self.saves and (self.loop_ends or due)
        if self.loop_ends or saving or step % self.options.log_every == 0:
            since = len(self.outcome.losses)
            self._catch_up()
            self._log(since)
        if self.saves and saving:
            self.saves.save(step)

    def _catch_up(self, alone: bool = False) -> None:
        """Reads what the device has finished, without the others if `alone`; RunError: a loss is
        not a number.
        """
        outcome = self.outcome
        timed = len(self.outcome.step_ms)
        losses = self.losses[len(outcome.losses) : self.steps_done].clone()
        if alone and agreement.active():
            outcome.own_from = len(outcome.losses)
        outcome.losses += (losses if alone else agreement.mean(losses)).tolist()
        bad = next(
            (i for i in range(timed, self.steps_done) if not math.isfinite(outcome.losses[i])), None
        )
        read = self.steps_done if bad is None else bad
        outcome.step_ms += self._times(timed, read)
        if bad is not None:
            loss = outcome.losses[bad]
            step = self.steps_before + bad + 1
            del outcome.losses[bad:]
            advice = f"lower --learning-rate (now {self.options.learning_rate})"
            raise RunError(f"the loss is {loss} at step {step}: {advice}", shared=not alone)

    def _times(self, start: int, stop: int) -> list[float]:
        return [self.clock.milliseconds(2 * i, 2 * i + 1) for i in range(start, stop)]

    def _log(self, since: int) -> None:
        median = summarize(self.outcome.step_ms[since:])["median"]
        options = self.options
        tokens = ranks.here().world_size * options.batch_size * options.seq_len
        left = math.ceil(median / 1e3 * (self.steps_planned - self.steps_done))
        self.line.show(
            f"step {self.steps_before + self.steps_done:5d}/{options.num_steps}  loss {self.outcome.losses[-1]:7.4f}  "
            f"{format_time(median):>9} a step  {tokens / median * 1e3:11,.0f} tokens/s"
            f"{f'  {duration(left):>6} left' if left else ''}"
        )

    # --------------------------------------------------------------------------------------------------------- its end

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._everything:
            ended = self._ended(error)
            if self.loop_begun:
                from common.training import ending

                with self._signals:
                    self._record(ended)
                ending.report(self, ended)
            if ended and ended is not error:
                raise ended
            if self.meetings and not error:
                if self.outcome.signal:  # then torchrun ends all processes as soon as one has ended
                    agreement.wait_for_all()
                if self.prepared and isinstance(self.prepared.step, CapturedStep):
                    self.prepared.step.release()

    def _ended(self, error: BaseException | None) -> BaseException | None:
        """The error that ended the run, in the words of a user where it is one of memory or of
        another process.
        """
        try:
            with explained(self.options), self._loop:
                if error:
                    raise error
        except BaseException as found:
            return found
        return None

    def _record(self, ended: BaseException | None) -> None:
        """Builds the record and writes it, before anything that could fail."""
        self.outcome.error = ended
        if self.signal and self.steps_done < self.steps_planned:  # or nothing was left to interrupt
            self.outcome.signal = self.signal
        self._write(self.outcome)
        if self.meetings and self.outcome.status == "completed":
            self.amend(ranks={"peak_mib": agreement.gathered(self.outcome.memory["peak_mib"])})

    def _write(self, outcome: Outcome) -> None:
        from common.training import record

        outcome.memory = devices.peak_memory(
            self.device, self.prepared.graph_peak_bytes if self.prepared else 0
        )
        self.record = record.build(self, outcome)
        self.amend()

    def amend(self, **sections: object) -> None:
        """Adds sections to the record, and writes it."""
        self.record = cast("TimedRun", {**self.record, **sections})
        if ranks.here().main_process:
            write_measurement(self.metrics, self.record, "--metrics-out")

    def _keep(self) -> None:
        """Writes the record of the finished steps from another thread, while the main one waits for
        the device.

        A GPU then answers nobody, so steps after the last line that was printed are missing.
        """
        read = len(self.outcome.step_ms)
        done = read if devices.is_gpu(self.device) else self.steps_done
        losses = self.outcome.losses[:read] + self.losses[read:done].tolist()
        times = self.outcome.step_ms[:read] + self._times(read, done)
        error = RunError("another process, or the device, no longer answers")
        self._write(Outcome(losses, times, error=error, own_from=read))


@contextmanager
def explained(options: Options) -> Iterator[None]:
    """Turns the errors of a lack of memory, and of another process that has ended, into those of a
    user.
    """
    try:
        yield
    except RunError:
        raise
    except (RuntimeError, MemoryError) as error:
        if devices.is_out_of_memory(error):
            raise RunError(
                f"out of memory: lower --batch-size or --seq-len (now {options.batch_size} and {options.seq_len}), "
                "take a smaller --preset, or try --use-amp"
            ) from error
        if agreement.lost(error):
            lost = "another process has ended, or has not answered within --distributed-timeout"
            raise RunError(f"{lost}: {first_line(error)}") from error
        raise

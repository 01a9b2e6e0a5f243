"""A training run: the context in which the loop of a version's script stands (`train` in each).

Exit codes are those of `common.cli.command`. Ctrl-C, SIGTERM and SIGHUP end the run after the step
in hand. Whatever ends it, the record of the finished steps is written before anything else, and
printed where it cannot be written. What only a flag or torchrun asks for is imported where it is
used.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from common import cli, data, ranks, spans
from common import device as devices
from common.options import Options, RunOptions
from common.precision import Precision, amp_dtype
from common.timing import Clock, OtherPrograms, summarize
from common.training import preparation
from common.training.preparation import Model, Optimizer, Prepared, Step
from tracepage import terminal
from tracepage.errors import RunError, UsageError, first_line
from tracepage.files import writable_file, writable_folder, write_measurement
from tracepage.terminal import Line, duration, format_time, progress

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from common.training.checkpoint import Checkpoints
    from common.training.distributed import Meetings
    from common.training.profiler import Profiler
    from tracepage.records.fields import Ceilings
    from tracepage.records.run_record import RunRecord, TimedRun


RECENT = 50  # steps whose median foretells the others


def resolve_for_device(
    options: RunOptions, name: str, captured: bool, forms: Sequence[str], device: torch.device
) -> RunOptions:
    """The options with the run's name, the form of --parallel, and whether the step is captured.

    UsageError: they do not go together.
    """
    form = None
    if ranks.here().launched:
        from common.training import distributed

        form = distributed.form(options, forms)
    capture_step = options.capture_step
    if capture_step is None:
        capture_step = captured and devices.is_gpu(device) and not options.time_phases
    if capture_step:
        from common.training import capture

        capture.check_supported(device, options.switches.get("torch-compile"))
    if options.memory_snapshot and not devices.is_gpu(device):
        raise UsageError("--memory-snapshot needs a GPU: the allocator of a CPU keeps no history")
    return replace(options, name=options.name or name, parallel=form, capture_step=capture_step)


def check_outputs(options: RunOptions, metrics: Path) -> None:
    """UsageError: a file or folder that the run will write to cannot be written."""
    inputs = [options.config]
    if options.data not in data.SOURCES:
        inputs.append(Path(options.data))
    if options.checkpoint_dir:
        inputs += options.checkpoint_dir.glob("step-*")
    writable_file(metrics, "--metrics-out", inputs)
    if options.memory_snapshot:
        flag = "--memory-snapshot"
        writable_file(options.memory_snapshot, flag)  # An empty name, . and / are folders.
        for suffix in (".pickle", ".json"):
            writable_file(options.memory_snapshot.with_suffix(suffix), flag, inputs)
    if options.save_model:
        writable_file(options.save_model / "config.json", "--save-model", inputs)
    if options.enable_deepspeed_flops:
        writable_folder(options.flops_dir, "--flops-dir")


class Run:
    """One training run and everything that was asked to be measured about it; of several processes
    the first writes it all.

    The host waits for the device only between two steps, where a line is printed, a checkpoint
    written, or processes meet. Losses are means over all processes; the last ones are the first's
    own if another dies.

    Attributes:
        options: those of `resolve_for_device`.
        device, precision, dataset: of the run.
        data: the batches, by the number of a step.
        clock: has two marks a step, before and after it.
        record: schema tiny-llama-run/1, at the end of the run.
        metrics: the file that holds it.
        profiles: what the profiler wrote, the profile first; empty without one.
        flops: what --enable-deepspeed-flops wrote, flops_profile.json first.

    UsageError: the options do not fit this machine or data. RunError: a parameter gets no gradient,
    the loss is not finite, or memory ran out.
    """

    # What the script makes, and what the end writes.
    model: nn.Module
    optimizer: torch.optim.Optimizer
    record: "RunRecord | TimedRun"
    # What is there only if it is asked for, or has begun.
    meetings: "Meetings | None" = None
    checkpoints: "Checkpoints | None" = None
    held_out: data.Batches | None = None
    profiler: "Profiler | None" = None
    ceilings: "Ceilings | None" = None
    flop_counts: dict[str, dict[str, int]] | None = None
    prepared: Prepared | None = None
    loop: "Loop | None" = None

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
        self.device = devices.select(options.device)
        others = OtherPrograms(self.device)
        self.options = resolve_for_device(options, name, captured, forms, self.device)
        self.metrics = options.metrics_out or Path(f"metrics_{self.options.name}.json")
        self.profiles: list[Path] = []
        self.flops: list[Path] = []
        self.status = "completed"
        self.scheduled = options.lr_schedule != "constant" or options.lr_warmup_steps > 0
        self.signal = 0  # that has ended the run
        self._postponed_signals = ExitStack()
        self._progress = ExitStack()
        if ranks.here().main_process:
            check_outputs(self.options, self.metrics)
        with ExitStack() as stack:
            stack.enter_context(explained(self.options))
            if self.options.parallel:
                from common.training import distributed

                # From here on `cuda` is this process's GPU.
                stack.enter_context(distributed.joined(self.options, self.device))
                self.meetings = distributed.Meetings(self.device)
            devices.configure(self.device, options.seed, options.allow_tf32, options.deterministic)
            devices.limit_memory(self.device, devices.describe(self.device)["memory_mib"])
            self.precision = Precision(self.device, amp_dtype(options))
            self.dataset = data.load(options.data, options.model.vocab_size, options.seed)
            if self.options.parallel:
                distributed.check_alike(self.options, self.dataset.sha256)
            if options.eval_steps:
                self.dataset, unseen = data.split(self.dataset)
                self.held_out = self._batches(unseen, options.eval_steps, seed=0)
            self.data = self._batches(self.dataset, options.num_steps, options.seed)
            if options.checkpoint_dir:
                from common.training.checkpoint import Checkpoints

                self.checkpoints = Checkpoints(self.options, self.precision, self.dataset)
            self.steps_before = self.checkpoints.steps_before if self.checkpoints else 0
            if options.enable_pytorch_profiler:
                from common.training.profiler import Profiler

                planned = replace(options, num_steps=options.num_steps - self.steps_before)
                self.profiler = Profiler(planned, self.device)
            note = others.note()
            if note:
                print(f"note: {note}", flush=True)
            if options.validate_setup:
                from common.training import record

                record.print_setup(self.device, self.dataset)
            advice = ""
            if devices.is_gpu(self.device):
                advice = "; where kernels are compiled, the first time takes about a minute"
            self._progress.enter_context(progress(f"warming up{advice}"))
            stack.enter_context(self._progress)
            self.clock = Clock(self.device)
            self._setup = stack.pop_all()

    def _batches(self, dataset: data.Dataset, count: int, seed: int) -> data.Batches:
        sizes = (self.options.batch_size, self.options.seq_len, count)
        return data.Batches(dataset, sizes, seed, self.device, ranks.here())

    def __enter__(self) -> "Run":
        return self

    @property
    def exit_code(self) -> int:
        """Of a process that ends with this run."""
        return 128 + self.signal if self.signal else 0

    # ----------------------------------------------------------------------------- before the loop

    def move_model(self, model: Model) -> Model:
        """The model on its device, in the form that a step calls, before its optimizer is made."""
        options = self.options
        self.model = model
        if ranks.here().main_process and (options.measure_peak or self.profiler):
            from common.training import ceilings

            self.ceilings = ceilings.measure(self.device, self.precision)
            torch.cuda.empty_cache()  # or its matrices would stay in the memory that is reserved
        model = preparation.move_model(model, self.device, options.checkpoint_activations)
        if not options.parallel:
            return model
        from common.training import distributed

        # Gradients are added up on the stream of this line in every later step.
        captured = bool(options.capture_step)
        with devices.stream_before_capture() if captured else nullcontext():
            return distributed.parallel_model(model, options.parallel, self.precision.dtype)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, not stepped yet, as a captured step or several processes need it."""
        if self.options.capture_step:
            optimizer = preparation.capturable(optimizer, self.precision)
        if self.options.parallel:
            from common.training import distributed

            optimizer = distributed.parallel_optimizer(optimizer, self.options.parallel)
        self.optimizer = optimizer
        return optimizer

    def check_and_capture(self, step: Step) -> Step:
        """The step that trains: its gradients are checked, it is warmed up and, where asked for,
        captured as a graph.

        Weights and states are those of the beginning afterwards, or those of the checkpoint that
        the run goes on from.
        """
        options = self.options
        batch = self.data[0]
        if self.scheduled and options.capture_step:
            from common import schedule

            schedule.move_rate(self.optimizer, self.device)
        prepared = Prepared(self.model, self.optimizer, step)
        preparation.warm_up(
            prepared,
            self.precision,
            batch,
            passes=options.warmup_steps,
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
                    options.memory_snapshot, lambda: step(batch), first, ranks.here().main_process
                )
        if options.capture_step:
            from common.training import capture

            if self.profiler:
                with preparation.without_update(self.optimizer, self.precision):
                    self.profiler.record_eager(lambda: step(batch))
            prepared = capture.captured_step(prepared, self.precision, batch)
        if ranks.here().main_process and options.enable_deepspeed_flops:
            from common.training import flop_counters

            self.flop_counts = flop_counters.count(self.model, batch, options.flops_dir)
        if self.checkpoints:
            self.checkpoints.load(prepared)
        self.prepared = prepared
        self._progress.close()
        return prepared.step

    # ------------------------------------------------------------------------------------ the loop

    def steps(self) -> Iterator[int]:
        """The number of each step, until --num-steps or a signal to one of the processes."""
        if self.scheduled:
            from common import schedule
        loop = Loop(self.options, self.device, self.clock, self.steps_before)
        devices.reset_peak_memory(self.device)
        self._postponed_signals.enter_context(cli.signals_postponed())
        if self.profiler:
            self.profiler.start()
        self.loop = loop
        loop.signals = loop.stack.enter_context(cli.signals_deferred())
        loop.stack.callback(loop.line.end)
        if self.meetings:
            timeout = self.options.distributed_timeout
            captured = bool(self.options.capture_step)
            loop.stack.enter_context(
                self.meetings.watched(self._write_unfinished, timeout, captured)
            )
        loop.stack.callback(loop.read, alone=True)  # also what was finished before an error
        if self.profiler:
            loop.stack.callback(self.profiler.stop)
        ranks.wait_for_all()
        for number in range(self.steps_before, self.options.num_steps):
            if self.scheduled:
                schedule.set_rate(self.optimizer, schedule.learning_rate(self.options, number))
            with spans.step_range(number):
                yield number
            if loop.ends:
                break

    def finished(self, loss: Tensor) -> None:
        """After a step: keeps its loss; prints, saves and meets the others where that is due."""
        loop = self.loop
        assert loop
        loop.keep(loss)
        overdue = loop.overdue
        if self.meetings:
            loop.signal, overdue = self.meetings.agree(loop.done, loop.signal, overdue)
        if self.profiler and loop.signal:
            self.profiler.stop()  # before what follows could count as a further step
        elif self.profiler:
            self.profiler.step(loop.done)
        step = self.steps_before + loop.done
        every = self.options.checkpoint_every
        # A checkpoint would be part of a profiled step.
        due = every and step % every == 0 and not spans.recording
        saving = self.checkpoints and (loop.ends or due)
        overdue = overdue and not spans.recording
        if loop.ends or saving or overdue or step % self.options.log_every == 0:
            loop.log()
        if self.checkpoints and saving:
            self.checkpoints.save(step)

    # ------------------------------------------------------------------------------------- the end

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._setup:
            ended = self._close_loop(error)
            if self.loop:
                with self._postponed_signals:
                    self._write_record(self.loop, ended)
                self._report(ended)
            if ended and ended is not error:
                raise ended
            if self.meetings and not error:
                if self.signal:  # then torchrun ends all processes as soon as one has ended
                    ranks.wait_for_all()
                if self.options.capture_step:
                    from common.training.capture import CapturedStep

                    if self.prepared and isinstance(self.prepared.step, CapturedStep):
                        self.prepared.step.release()

    def _close_loop(self, error: BaseException | None) -> BaseException | None:
        """The error that ended the run, in the words of `explained`."""
        try:
            with explained(self.options), self.loop.stack if self.loop else nullcontext():
                if error:
                    raise error
        except BaseException as ended:
            return ended
        return None

    def _write_record(self, loop: "Loop", ended: BaseException | None) -> None:
        """Builds the record and writes it, before anything that could fail."""
        if not loop.complete:  # or nothing was left to interrupt
            self.signal = loop.signal
        if ended and not isinstance(ended, KeyboardInterrupt | BrokenPipeError):
            self.status = f"failed: {first_line(ended, type(ended).__name__)}"
        elif ended or self.signal:
            self.status = "interrupted"
        self._write(self.status, loop.losses, loop.step_ms, loop.own_losses)
        if self.meetings and self.status == "completed":
            self.amend(ranks={"peak_mib": ranks.gathered(self.record["memory"]["peak_mib"])})

    def _write_unfinished(self) -> None:
        """Writes the record from another thread, while the main one waits for the device."""
        assert self.loop
        losses, step_ms, own_losses = self.loop.finished_without_waiting()
        lost = "failed: another process, or the device, no longer answers"
        self._write(lost, losses, step_ms, own_losses)

    def _write(
        self, status: str, losses: list[float], step_ms: list[float], own_losses: int
    ) -> None:
        from common.training import record

        assert self.prepared
        self.record = record.build(
            self.options,
            self.precision,
            self.dataset,
            self.prepared.model,
            status=status,
            losses=losses,
            own_losses=own_losses,
            step_ms=step_ms,
            profiled=self.profiler.slow_steps(len(step_ms)) if self.profiler else 0,
            first_step=self.steps_before + 1,
            memory=devices.peak_memory(self.device, self.prepared.graph_peak_bytes),
            ceilings=self.ceilings,
        )
        self.amend()

    def amend(self, **sections: object) -> None:
        """Adds sections to the record, and writes it."""
        self.record = cast("TimedRun", {**self.record, **sections})
        if ranks.here().main_process:
            write_measurement(self.metrics, self.record, "--metrics-out")

    def _report(self, ended: BaseException | None) -> None:
        """Prints the summary of the record; after a loop that no error ended, writes and measures
        what flags ask for.
        """
        from common.training import ending
        from tracepage.show import run_facts

        options = self.options
        completed = self.status == "completed"
        assert self.prepared
        if self.held_out and completed:
            held_out = ending.evaluate(self.prepared.model, self.held_out, self.precision, options)
            self.amend(held_out=held_out)
        if options.switches.get("fp8") and not ended:
            self.amend(fp8=ending.fp8_saturation(self.prepared.optimizer))
        print(run_facts.summary(self.record))
        print(f"  metrics      {self.metrics}")
        if ended:
            return
        if options.save_model:
            ending.save_model(options.save_model, self.prepared, options, self.dataset)
        if options.time_phases and completed:
            phases = ending.time_phases(self.prepared.step, self.data, options, self.device)
            self.amend(phases_ms=phases)
            print(run_facts.phases(self.record))
        if self.flop_counts:
            self.flops = ending.write_flops(options.flops_dir, self.flop_counts, self.record)
        # A run that was stopped may not have reached the steps that are profiled.
        if self.profiler and self.profiler.recorded:
            self.profiles = ending.write_profile(self.profiler, self.record, options, self.flops)
        if options.validate_setup and ranks.here().main_process:
            ending.check_files(self.metrics, self.profiles)
        if completed:
            ending.print_next_command(options, self.profiles)


class Loop:
    """The finished steps of a run, however it ended, and the lines that tell of them."""

    def __init__(
        self, options: RunOptions, device: torch.device, clock: Clock, steps_before: int
    ) -> None:
        """`steps_before`: those of the checkpoint that the run goes on from."""
        self.options = options
        self.clock = clock
        self.steps_before = steps_before
        self.planned = options.num_steps - steps_before
        self.done = 0
        self.on_device = torch.empty(self.planned, device=device)  # losses
        # Nats per token, from before each finished step, read from the device.
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        # The last losses, which are this process's alone, as another has ended.
        self.own_losses = 0
        self.signals: list[int] = []  # received
        self.signal = 0  # that ends the run
        self.line = Line(sys.stdout)
        self.last_line = time.monotonic()
        self.stack = ExitStack()  # what lasts as long as the loop

    @property
    def complete(self) -> bool:
        return self.done == self.planned

    @property
    def ends(self) -> bool:
        """Whether the last step was the run's last."""
        return self.signal > 0 or self.complete

    @property
    def overdue(self) -> bool:
        """Whether a line is due by the clock, before --log-every steps are done."""
        return time.monotonic() - self.last_line > terminal.SECONDS

    def keep(self, loss: Tensor) -> None:
        """Counts a step, without waiting for it."""
        self.on_device[self.done] = loss  # copied: a captured step overwrites it
        self.done += 1
        self.signal = self.signals[0] if self.signals else 0

    def read(self, alone: bool = False) -> None:
        """Reads what is finished, without the others if `alone`. RunError: a loss is no number."""
        start = len(self.step_ms)
        losses = self.on_device[len(self.losses) : self.done].clone()
        if alone and ranks.joined():
            self.own_losses = len(losses)
        self.losses += (losses if alone else ranks.mean(losses)).tolist()
        stop = start
        while stop < self.done and math.isfinite(self.losses[stop]):
            stop += 1
        self.step_ms += self._times(start, stop)
        if stop < self.done:
            loss = self.losses[stop]
            self.own_losses = max(0, self.own_losses - len(self.losses[stop:]))
            del self.losses[stop:]
            step = self.steps_before + stop + 1
            advice = f"lower --learning-rate (now {self.options.learning_rate})"
            raise RunError(f"the loss is {loss} at step {step}: {advice}", shared=not alone)

    def finished_without_waiting(self) -> tuple[list[float], list[float], int]:
        """Losses, times and how many of the last losses are this process's alone, while the main
        thread waits for the device.

        A GPU then answers nobody, so steps after the last line that was printed are missing.
        """
        read = len(self.step_ms)
        done = read if devices.is_gpu(self.clock.device) else self.done
        losses = self.losses[:read] + self.on_device[read:done].tolist()
        return losses, self.step_ms + self._times(read, done), done - read

    def _times(self, start: int, stop: int) -> list[float]:
        return [self.clock.milliseconds(2 * i, 2 * i + 1) for i in range(start, stop)]

    def log(self) -> None:
        """Reads and prints the steps since the last line."""
        since = len(self.losses)
        self.read()
        median = summarize(self.step_ms[since:])["median"]
        options = self.options
        tokens = ranks.here().world_size * options.batch_size * options.seq_len
        recent = summarize(self.step_ms[-RECENT:])["median"]
        left = math.ceil(recent / 1e3 * (self.planned - self.done))
        line = (
            f"step {self.steps_before + self.done:5d}/{options.num_steps}  "
            f"loss {self.losses[-1]:6.4f}  {format_time(median):>7} a step  "
            f"{tokens / median * 1e3:11,.0f} tokens/s"
        )
        if left:
            line += f"  {duration(left):>6} left"
        if len(line) >= terminal.LEAST:
            line = " ".join(line.split())
        self.line.show(line)
        self.last_line = time.monotonic()


@contextmanager
def explained(options: Options) -> Iterator[None]:
    """Turns errors of memory, and of another process that has ended, into RunErrors."""
    try:
        yield
    except RunError:
        raise
    except (RuntimeError, MemoryError) as error:
        if devices.is_out_of_memory(error):
            sizes = f"{options.batch_size} and {options.seq_len}"
            raise RunError(
                f"out of memory: lower --batch-size or --seq-len (now {sizes}), "
                "take a smaller --preset, or try --use-amp"
            ) from error
        if ranks.lost(error):
            lost = "another process has ended, or has not answered within --distributed-timeout"
            raise RunError(f"{lost}: {first_line(error)}") from error
        raise

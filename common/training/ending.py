"""The end of a run: its summary, and the files that flags ask for. Training calls reports here, and
nowhere else.

`common.training.run` imports it after its loop, so `run` is Any here.
"""

import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from common import ROOT, ranks
from common.timing import Clock, phase_times, summarize
from common.training import agreement
from tracepage.errors import RunError
from tracepage.records import run_record, step_profile
from tracepage.records.run_record import TimedRun
from tracepage.show import run_facts

import torch


def report(run: Any, ended: BaseException | None) -> None:
    """Prints the summary of the record; after a loop that no error ended, writes and measures what
    flags ask for.
    """
    if run.held_out and run.outcome.status == "completed":
        _evaluate(run)
    print(run_facts.summary(run.record))
    print(f"  metrics      {run.metrics}")
    if ended:
        return
    if run.options.save_model:
        _save_model(run)
    if run.options.time_phases and run.outcome.status == "completed":
        _time_phases(run)
    if run.flop_counts:
        _write_flops(run)
    # a run that was stopped may not have reached the steps that are profiled
    if run.profiler and run.profiler.recorded:
        _write_profile(run)
    if run.options.validate_setup and ranks.here().main_process:
        _check_files(run)
    versions = sorted(ROOT.glob("version*_*/tiny_llama_v*.py"))
    script = Path(sys.argv[0]).resolve()
    # or the same command would not do the same again
    alone = not ranks.here().launched and not run.options.checkpoint_dir
    if script in versions and alone and run.outcome.status == "completed":
        print(f"next: python {shlex.join(_next(run, versions[versions.index(script) + 1 :]))}")


def _evaluate(run: Any) -> None:
    """Adds the loss on the held-out batches, a mean over all processes, to the record. RunError: it
    is not finite.
    """
    losses = torch.empty(run.options.eval_steps, device=run.device)
    for i in range(len(losses)):
        with torch.no_grad(), run.precision.autocast():
            losses[i] = run.prepared.model.loss(*run.held_out[i])
    loss = agreement.mean(losses.double().mean())
    perplexity = loss.exp().item()
    if not math.isfinite(perplexity):
        raise RunError(f"the held-out loss is {loss:.3g}: lower --learning-rate", shared=True)
    sequences = ranks.here().world_size * run.options.batch_size * len(losses)
    run.amend(held_out={"loss": loss.item(), "perplexity": perplexity, "sequences": sequences})


def _save_model(run: Any) -> None:
    from common.training import checkpoint

    state = checkpoint.whole_model(run.prepared)
    if ranks.here().main_process:
        checkpoint.save(run.options.save_model, state, run.options.model, run.dataset)
    print(f"  checkpoint   {run.options.save_model}")


def _time_phases(run: Any) -> None:
    train = run.prepared.step
    times = phase_times(lambda i: train(run.data[i]), run.device, run.options.phase_clock or Clock)
    run.amend(phases_ms={phase: summarize(values) for phase, values in times.items()})
    print(run_facts.phases(run.record))


def _write_flops(run: Any) -> None:
    from common.training import flop_counters

    run.flops = flop_counters.write(
        run.options.flops_dir, run.flop_counts, cast(TimedRun, run.record)
    )
    for path in run.flops:
        print(f"  flops        {path}")


def _write_profile(run: Any) -> None:
    """pandas and matplotlib take a second and 60 MiB, which belong to no run that is not profiled."""
    from common.training import flop_counters, profile_files
    from tracepage.views import profile_summary

    options = run.options
    profiler = run.profiler
    content = {
        "run": run.record,
        "trace": profiler.trace_path.name,
        "attention_only": options.profile_attention_only,
    }
    if options.profile_with_flops:
        content["operator_flops"] = profiler.operator_flops()
    profiler.export()
    if not ranks.here().main_process:
        return
    run.profiles = profile_files.write(profiler.profile_path, content)
    if options.profile_operators:
        print(
            profile_summary.operator_report(
                step_profile.read(profiler.profile_path), options.sort_by
            ).terminal()
        )
    if run.flops:
        flop_counters.add_work(run.flops[0], profiler.profile_path)
    for path in run.profiles:
        print(f"  {'page' if path.suffix == '.html' else 'profile':<12} {path}")


def _check_files(run: Any) -> None:
    """Reads back what the run wrote, and prints a line."""
    record = run_record.read(run.metrics)
    profiled = "".join(
        f", {path} holds {len(step_profile.read(path)['operators']):,} operators"
        for path in run.profiles[:1]
    )
    print(
        f"setup ok: {record['parameters']:,} parameters get gradients, {run.metrics} can be read{profiled}"
    )


def _next(run: Any, later: Sequence[Path]) -> list[str]:
    """A command for this folder: the same run profiled; then its page beside the newest other
    profile, or the next version.
    """
    if not run.profiles:
        return [*sys.argv, "--enable-pytorch-profiler"]
    profile = run.profiles[0]
    options = run.options
    found = ROOT.glob(f"version*_*/{options.profile_dir.name}/profile_*.json")
    others = sorted(
        (path for path in found if path.name != profile.name), key=lambda path: path.name
    )
    if others or not later:
        return [os.path.relpath(path) for path in (ROOT / "page.py", *others[-1:], profile)]
    return [os.path.relpath(later[0]), "--preset", options.preset, *["--use-amp"] * options.use_amp]

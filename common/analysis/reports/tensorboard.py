"""TensorBoard event files of a profiled run, for plain TensorBoard without a plugin.

scalars         loss, step time and tokens/s by step; memory and MFU
text            conditions; the tables are in run.html
images          time by span; memory over time
"""

from pathlib import Path

from common.analysis.output import run_facts
from common.analysis.profiles.chrome_trace import Trace
from common.analysis.reports import memory_timeline, profile_summary
from common.records import run_record
from common.records.step_profile import Profile

from torch.utils.tensorboard import SummaryWriter


def write(folder: Path, profile: Profile, trace: Trace) -> Path:
    """Writes one event file of a profile and of its trace into `folder`, which is a run of its own for TensorBoard."""
    with SummaryWriter(str(folder)) as writer:
        last = _add_run(writer, profile)
        writer.add_text("profile/run", f"{profile_summary.conditions(profile)}.\n\n{run_facts.origin(profile['run'])}.", last)
        writer.add_figure("profile/time by span", profile_summary.span_figure(profile), last)
        if profile["memory_peak_bytes"] is not None:
            writer.add_figure("profile/memory", memory_timeline.figure(trace), last)
    return folder


def _add_run(writer: SummaryWriter, profile: Profile) -> int:
    """Adds losses, times and results of the run; returns the number of its last step."""
    run = profile["run"]
    training, losses, times = run["training"], run["loss"]["all"], run["step_ms"]["all"]
    tokens = run_record.processes(run) * training["batch_size"] * training["sequence_length"]  # of all processes
    first = training.get("first_step", 1)  # above 1 in a run that went on from a checkpoint
    for step, (loss, milliseconds) in enumerate(zip(losses, times, strict=True), start=first):
        writer.add_scalar("train/loss", loss, step)
        writer.add_scalar("train/step_ms", milliseconds, step)
        writer.add_scalar("train/tokens_per_second", tokens / milliseconds * 1e3, step)
    results = {
        "result/step_ms_median": run["step_ms"]["median"], "result/tokens_per_second": run["tokens_per_second"],
        "result/peak_memory_mib": run["memory"]["peak_mib"], "result/loss_last": losses[-1],
    }  # fmt: skip
    if (mfu := run_facts.mfu(run)) is not None:
        results["result/mfu"] = mfu / 100
    last = first + len(times) - 1
    for tag, value in results.items():
        writer.add_scalar(tag, value, last)
    return last

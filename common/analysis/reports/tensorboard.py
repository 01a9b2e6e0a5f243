"""TensorBoard event files of a profiled run, for plain TensorBoard without a plugin.

scalars         loss, step time and tokens/s by step; memory and MFU
histograms      step times; times of the GPU's kernels, or the self times of operators on a CPU
text            conditions; a link that opens the trace in Perfetto; time by span, kernels, operators, intensity
images          time by span; memory over time
HPARAMS         configuration and results, so that runs can be compared
"""

import shutil
import tempfile
from pathlib import Path

from common.analysis.output import run_facts, tables
from common.analysis.profiles.chrome_trace import Trace
from common.analysis.reports import memory_timeline, profile_summary, roofline
from common.records import run_record
from common.records.step_profile import Profile

import numpy
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams


def write(folder: Path, profile: Profile, trace: Trace) -> Path:
    """Writes one event file of a profile and of its trace, which lies beside `folder`, into `folder`: a run of its own for
    TensorBoard. Returns the folder.
    """
    with tempfile.TemporaryDirectory() as made:  # the writer's thread would print a traceback where `folder` is full
        with SummaryWriter(made) as writer:
            last = _add_run(writer, profile)
            _add_profile(writer, profile, trace, (folder.parent / profile["trace"]).absolute(), last)
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(made).iterdir():
            shutil.copy(file, folder)
    return folder


def _add_run(writer: SummaryWriter, profile: Profile) -> int:
    """Adds losses, times, results and settings of the run; returns the number of its last step."""
    run = profile["run"]
    training, losses, times = run["training"], run["loss"]["all"], run["step_ms"]["all"]
    tokens = run_record.processes(run) * training["batch_size"] * training["sequence_length"]  # of all processes
    first = training.get("first_step", 1)  # above 1 in a run that went on from a checkpoint
    last = first + len(times) - 1
    for step, (loss, milliseconds) in enumerate(zip(losses, times, strict=True), start=first):
        writer.add_scalar("train/loss", loss, step)
        writer.add_scalar("train/step_ms", milliseconds, step)
        writer.add_scalar("train/tokens_per_second", tokens / milliseconds * 1e3, step)
    writer.add_histogram("train/step_ms", numpy.array(times[: run["step_ms"]["count"]]), last)
    results = {
        "result/step_ms_median": run["step_ms"]["median"],
        "result/tokens_per_second": run["tokens_per_second"],
        "result/peak_memory_mib": run["memory"]["peak_mib"],
        "result/loss_last": losses[-1],
    }
    if (mfu := run_facts.mfu(run)) is not None:
        results["result/mfu"] = mfu / 100
    for tag, value in results.items():
        writer.add_scalar(tag, value, last)
    settings = {**training, **run["model"], "version": run["version"], "precision": run["precision"]["compute"]}
    for summary in hparams({key: str(value) for key, value in settings.items()}, results):
        writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
    return last


def _add_profile(writer: SummaryWriter, profile: Profile, trace: Trace, path: Path, last: int) -> None:
    """Adds the texts, histogram and images of the profile, whose trace is at `path`, at the run's last step."""
    run, conditions = profile["run"], profile_summary.conditions(profile)
    header, operators, column = profile_summary.operator_rows(profile)
    texts = {
        "run": f"{conditions}.\n\n{run_facts.origin(run)}.",
        "trace": f"Open `{path}` at https://ui.perfetto.dev, or make its page with `python page.py {path}`.",
        "time by span": tables.markdown(*profile_summary.span_rows(profile)),
        "top operators": f"Per step, sorted by {profile_summary.LABELS[column]}.\n\n"
        + tables.markdown(header, operators[: profile_summary.ROWS]),
    }
    if profile["kernels"]:
        header, kernels = profile_summary.kernel_rows(profile)
        texts["top kernels"] = tables.markdown(header, kernels[: profile_summary.ROWS], code=["kernel"])
    if run["ceilings"]:
        intensity = tables.markdown(*roofline.table(roofline.from_profile(profile), run["ceilings"]))
        texts["intensity"] = f"{roofline.describe(run['ceilings'])}.\n\n{intensity}"
    for name, text in texts.items():
        writer.add_text(f"profile/{name}", text, last)
    times = trace.kernels.duration_us if profile["kernels"] else trace.operators.self_cpu_us
    if len(times):
        writer.add_histogram(f"profile/{'kernel' if profile['kernels'] else 'operator'}_us", times.to_numpy(), last)
    writer.add_figure("profile/time by span", profile_summary.span_figure(profile), last)
    if profile["memory_peak_bytes"] is not None:
        writer.add_figure("profile/memory", memory_timeline.figure(trace), last)

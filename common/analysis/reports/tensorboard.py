"""TensorBoard event files of a profiled run, for plain TensorBoard without a plugin.

The files hold scalars (loss, step time and tokens/s by step; memory and MFU), the table of operators as text, time by span and
memory over time as figures, and the configuration with the results of the run under HPARAMS, so that runs can be compared.
"""

import shutil
import tempfile
from pathlib import Path

from common.analysis.output import run_facts, tables
from common.analysis.profiles.chrome_trace import Trace
from common.analysis.reports import memory_timeline, profile_summary
from common.records.step_profile import Profile

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams


def write(folder: Path, profile: Profile, trace: Trace) -> Path:
    """Writes one event file into `folder`, a run of its own for TensorBoard. Returns the folder.

    Args:
        trace: the trace that the profile was made from.
    """
    run = profile["run"]
    training = run["training"]
    tokens = training.get("world_size", 1) * training["batch_size"] * training["sequence_length"]  # of all processes
    with tempfile.TemporaryDirectory() as made:  # the writer's thread would print a traceback where `folder` is full
        with SummaryWriter(made) as writer:
            for step, (loss, milliseconds) in enumerate(zip(run["loss"]["all"], run["step_ms"]["all"], strict=True), start=1):
                writer.add_scalar("train/loss", loss, step)
                writer.add_scalar("train/step_ms", milliseconds, step)
                writer.add_scalar("train/tokens_per_second", tokens / milliseconds * 1e3, step)
            last = len(run["loss"]["all"])
            results = {
                "result/step_ms_median": run["step_ms"]["median"],
                "result/tokens_per_second": run["tokens_per_second"],
                "result/peak_memory_mib": run["memory"]["peak_mib"],
                "result/loss_last": run["loss"]["all"][-1],
            }
            if (mfu := run_facts.mfu(run)) is not None:
                results["result/mfu"] = mfu / 100
            for tag, value in results.items():
                writer.add_scalar(tag, value, last)
            settings = {**training, **run["model"], "version": run["version"], "precision": run["precision"]["compute"]}
            for summary in hparams({key: str(value) for key, value in settings.items()}, results):
                writer.file_writer.add_summary(summary)
            header, body, column = profile_summary.operator_rows(profile)
            table = tables.markdown(header, body[: profile_summary.ROWS])
            writer.add_text("profile/top operators", f"Per step, sorted by {profile_summary.LABELS[column]}.\n\n{table}", last)
            writer.add_figure("profile/time by span", profile_summary.span_figure(profile), last)
            if profile["memory_peak_bytes"] is not None:
                writer.add_figure("profile/memory", memory_timeline.figure(trace), last)
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(made).iterdir():
            shutil.copy(file, folder)
    return folder

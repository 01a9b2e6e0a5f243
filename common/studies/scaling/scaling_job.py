"""A job of a scaling study: a torchrun job of a version's own script, and what its record and its traces say.

The last steps of the first repeat of a cell are profiled. They do not count in the step time. The traces of all ranks show the
time of communication: overlapped or exposed, and moving bytes or waiting for a slow rank (`analysis.profiles.communication`).
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from common.analysis.formulas.data_parallel import Beside
from common.analysis.profiles import communication
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.fields import Summary, Timed
from common.records.step_profile import Profile
from common.records.study_files import PHASES, Collectives, ScalingCell
from common.studies.job_runner import Outcome
from common.studies.known_models import Model
from common.studies.scaling import torchrun
from common.studies.scaling.scaling_results import place
from common.studies.scaling.torchrun import ScalingOptions


def run(cell: ScalingCell, model: Model, options: ScalingOptions, profiled: bool, gpus: str | None = None) -> Outcome:
    """The outcome of one job of a cell: its status and reason, and if that is "ok" what the job measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = folder / "profiles"
        steps = options.num_steps + (options.profile_steps + 1) * profiled
        command = [
            str(model.path), *model.flags, "--preset", options.preset, "--batch-size", str(cell["batch_size"]),
            "--seq-len", str(options.seq_len), "--seed", str(options.seed), "--device", options.device, "--data", "synthetic",
            "--num-steps", str(steps), "--metrics-out", "metrics.json",
        ]  # fmt: skip
        command += ["--config", str(options.config.resolve())] if options.config else []
        command += ["--use-amp"] if options.use_amp else []
        command += ["--amp-dtype", options.amp_dtype] if options.amp_dtype else []
        command += ["--parallel", cell["parallel"]] if cell["parallel"] else []
        capture = True if model.captured else options.capture_step
        command += [] if capture is None else ["--capture-step" if capture else "--no-capture-step"]
        command += ["--profile-dir", str(profiles), "--profile-steps", str(options.profile_steps)] if profiled else []
        code, said = torchrun.run(cell["processes"], command, options, folder, gpus)
        if code != 0 or not (folder / "metrics.json").exists():
            return torchrun.ending(code, said, options)
        record = run_record.read_timed(folder / "metrics.json")
        step, memory = record["step_ms"], record["memory"]
        peaks = record["ranks"]["peak_mib"] if "ranks" in record else [memory["peak_mib"]]
        times: Summary = {"median": step["median"], "p20": step["p20"], "p80": step["p80"], "count": step["count"]}
        measured: Timed = {"kind": memory["kind"], "peak_mib": max(peaks), "step_ms": times}
        outcome: Outcome = {"status": "ok", "reason": None, "run": measured}
        outcome |= {key: value for key, value in record.items() if key in ("device", "environment", "parameters")}
        if profiled:
            beside_backward = record["training"].get("optimizer_communicates", False)
            outcome["traced"] = traced(profiles, cell, beside_backward)
            if options.keep_traces:
                kept = re.sub(r"\W+", "_", place(cell))
                shutil.copytree(profiles, options.output_dir / "traces" / kept, dirs_exist_ok=True)
        return outcome


def traced(profiles: Path, cell: ScalingCell, beside_backward: bool) -> dict[str, Any]:
    """The keys of a cell that come from the traces of its job, or the reason why the traces give none."""
    try:
        if cell["processes"] == 1:
            return {"shares": shares(step_profile.read(step_profile.find(profiles)))}
        paths = communication.find(profiles)
        if len(paths) != cell["processes"]:
            raise UsageError(f"{len(paths)} processes of {cell['processes']} wrote a trace")
        loaded = [communication.load(path, cell["processes"]) for path in paths]
        counts = communication.counted(loaded[0])
        if eager := sorted(profiles.glob("eager_trace_2*.json")):  # a captured step's trace has no sizes: those of the eager one
            counts = communication.counted(communication.load(eager[0], cell["processes"])) or counts
        return {"ranks": communication.split(loaded), "collectives": placed(counts, cell["parallel"], beside_backward)}
    except UsageError as error:
        return {"trace_problem": str(error)}


def shares(profile: Profile) -> dict[str, float]:
    """Shares of forward pass, backward pass and optimizer in a profiled step, by kernels or on a CPU by operators."""
    spans = step_profile.span_milliseconds(profile).values()
    times = {phase: max(0.0, sum(phases.get(phase, 0.0) for phases in spans)) for phase in PHASES}
    total = sum(times.values())
    if not total:
        raise UsageError("the profile of one process holds no time of any phase")
    return {phase: time / total for phase, time in times.items()}


def placed(counts: dict[str, tuple[float, float | None]], form: str | None, beside_backward: bool) -> list[Collectives]:
    """The collectives of a step by kind, and what they can overlap with.

    Gradients are sent beside the backward pass. Weights are sent after the update, or in fsdp beside both passes.

    Args:
        beside_backward: whether the update is, too, and so the weights that it sends.
    """
    found: list[Collectives] = []
    for kind, (count, size) in counts.items():
        weights = kind in ("all_gather", "broadcast")
        places: list[Beside] = ["forward", "backward"] if weights and form == "fsdp" else ["backward"]
        places = ["nothing"] if weights and form != "fsdp" and not beside_backward else places
        part = None if size is None else size / len(places)
        found += [{"kind": kind, "count": count / len(places), "bytes": part, "beside": beside} for beside in places]
    return found

"""Tables made from the measured runs in results/<device>/, for the documents.

    v1_<preset>.json           a run's record (schema tiny-llama-run/1)
    v1_<preset>_profile.json   a profile of the same configuration (schema tiny-llama-profile/1)

`results/measure_v1.sh` writes both.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.analysis import profile_report, tables
from common.config import PRESETS
from common.errors import UsageError
from common.files import read_json

RUN_SCHEMA = "tiny-llama-run/1"


def _each(folders: tuple[Path, ...], suffix: str, schema: str) -> Iterator[dict[str, Any]]:
    """Files of the folders that exist, in the order of the presets."""
    for folder in folders:
        found = [folder / f"v1_{preset}{suffix}.json" for preset in PRESETS]
        found = [path for path in found if path.exists()]
        if not found:
            raise UsageError(f"no v1_*{suffix}.json in {folder}: measure with results/measure_v1.sh {folder.name}")
        for path in found:
            yield read_json(path, schema)


def _device(run: dict[str, Any]) -> str:
    threads = run["device"].get("threads")
    return f"{run['device']['name']}, {threads} threads" if threads else run["device"]["name"]


def _named(run: dict[str, Any]) -> str:
    return f"{run['training']['preset']}, {_device(run)}"


def training(*folders: Path) -> str:
    """One row a run: shape, step time, throughput, memory, rate, utilisation and loss."""
    rows = []
    for run in _each(folders, "", RUN_SCHEMA):
        step, last = run["step_ms"], run["loss"]["all"][-20:]
        rows.append([
            run["training"]["preset"], _device(run), run["precision"]["compute"],
            f"{run['training']['batch_size']} x {run['training']['sequence_length']}", run["parameters"] / 1e6,
            step["median"], f"{tables.figure(step['p20'])} to {tables.figure(step['p80'])}", run["tokens_per_second"],
            f"{tables.figure(run['memory']['peak_mib'])} ({run['memory']['kind']})", run["flops_per_second"] / 1e12,
            100 * run["mfu"]["utilization"] if run["mfu"] else None,
            f"{run['loss']['all'][0]:.2f} to {sum(last) / len(last):.2f} in {len(run['loss']['all'])} steps",
        ])  # fmt: skip
    header = ["preset", "device", "precision", "B x S", "M parameters", "ms/step", "p20 to p80", "tokens/s", "peak MiB",
              "TFLOP/s", "MFU %", "loss"]  # fmt: skip
    return tables.markdown(header, rows)


def phases(*folders: Path) -> str:
    """Forward, backward and optimizer of each run, in ms, timed apart."""
    rows = [
        [_named(run), *(run["phases_ms"][phase]["median"] for phase in ("forward", "backward", "optimizer"))]
        for run in _each(folders, "", RUN_SCHEMA)
    ]
    return tables.markdown(["run", "forward ms", "backward ms", "optimizer ms"], rows)


def spans(*folders: Path) -> str:
    """Where a profiled step's time goes, in % of its wall time: GPU kernels, or CPU operators, by span."""
    columns: dict[str, dict[str, float]] = {}
    for profile in _each(folders, "_profile", profile_report.SCHEMA):
        wall = sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
        shares = {
            span: 100 * sum(by_phase.values()) / wall for span, by_phase in profile_report.span_milliseconds(profile).items()
        }
        idle = (
            100 * (1 - profile["device_busy_us"] / sum(profile["step_us"])) if profile["kernels"] else 100 - sum(shares.values())
        )
        columns[_named(profile["run"])] = shares | {"GPU idle, or outside operators": idle}
    names = list(dict.fromkeys(name for shares in columns.values() for name in shares if not name.startswith("GPU idle")))
    rows = [
        [name, *(shares.get(name, 0.0) for shares in columns.values())] for name in [*names, "GPU idle, or outside operators"]
    ]
    return tables.markdown(["% of step", *columns], rows)


def ceilings(*folders: Path) -> str:
    """What each device was measured to do at best."""
    found = {}
    for run in _each(folders, "", RUN_SCHEMA):
        found.setdefault(_device(run), run["ceilings"])
    rows = [
        [name, c["precision"], c["flops_per_second"] / 1e12, c["bytes_per_second"] / 1e9, c["operation_seconds"] * 1e6]
        for name, c in found.items()
    ]
    return tables.markdown(["device", "precision", "GEMM TFLOP/s", "copy GB/s", "one small operation, us"], rows)


TABLES: dict[str, Callable[..., str]] = {"training": training, "phases": phases, "spans": spans, "ceilings": ceilings}

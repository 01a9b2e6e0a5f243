"""A file of a profiler, loaded once: the reader of its format makes a `Source`, and every view
takes it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tracepage.errors import UsageError
from tracepage.readers.kernel_names import category
from tracepage.readers.trace import Trace
from tracepage.records.step_profile import Profile
from tracepage.terminal import counted

import pandas

CALL_COLUMNS = ("name", "category", "start_ns", "duration_ns", "calls", "span", "phase")
OTHER_TRACE = "chrome-trace"  # The kind of a Chrome trace that no profiler of a GPU wrote.
SERIALIZED_NOTE = (
    "counters are collected kernel by kernel, so the time between kernels is the profiler's: "
    "no busy share"
)


@dataclass(frozen=True)
class Source:
    """One loaded file.

    `table` is its table of calls: a row per launch of a kernel, copy or fill, or per kernel name
    where the file has only sums. On a CPU a row is a call of an operator that does work.

        name             in full
        category         kernel, memcpy, memset or operator; of another program, that of its event
        start_ns         since the first start of the table; NaN in a row that is a sum
        duration_ns      of all calls of the row
        calls            how many calls the row stands for
        span, phase      of the model, as in `Trace`; empty where the file does not tell

    Each is there in every source. A trace of torch.profiler also has the other columns of
    `Trace.kernels` (`stream`, `step`, `launch_delay_ns`, ...), and its table holds the calls of the
    profiled steps alone, if there are any. Another Chrome trace has `track` and `detail`.
    """

    kind: str  # A key of `load_kernels.READERS`, or OTHER_TRACE.
    path: Path  # The file that was read.
    table: pandas.DataFrame
    # A column per counter, with rows as in `table`; in ns, byte, byte/s and hz, without prefixes.
    counters: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    steps: int | None = None  # Training steps of the rows; None if the file does not say.
    gpus: int = 1
    notes: tuple[str, ...] = ()  # Caveats, for a reader of the numbers.
    trace: Trace | None = None  # All events of a trace of torch.profiler.
    profile: Profile | None = None  # The content of a profile_*.json.

    @property
    def are_operators(self) -> bool:
        return bool((self.table.category == "operator").any())

    @property
    def device(self) -> str:
        """The names of the devices that did the work; empty where the file does not tell."""
        if self.profile:
            return self.profile["run"]["device"]["name"]
        devices = self.trace.devices if self.trace else []
        return " and ".join(dict.fromkeys(str(device.get("name", "")) for device in devices))


def make_source(
    kind: str, path: Path, columns: Mapping[str, Iterable] | pandas.DataFrame, **rest
) -> Source:
    """A source whose `columns` may lack any column of the table but name and duration_ns; start_ns
    counts from any origin. UsageError: nothing takes any time.
    """
    table = pandas.DataFrame(
        {"calls": 1, "start_ns": float("nan"), "span": "", "phase": ""}
        | {str(name): list(values) for name, values in columns.items()}
    )
    if len(table) and not table.duration_ns.any():
        rows = counted(len(table), "row")
        raise UsageError(f"{path} holds no durations: all of its {rows} take no time")
    # This comes before it is a float: nanoseconds of a clock can exceed a double.
    table["start_ns"] -= table.start_ns.min()
    if "category" not in table:
        table["category"] = table.name.map(category)
    table = table.astype({"start_ns": float, "duration_ns": float, "calls": int})
    rest.setdefault("counters", pandas.DataFrame(index=table.index))
    others = [name for name in table if name not in CALL_COLUMNS]
    return Source(kind, path, table[[*CALL_COLUMNS, *others]], **rest)


def several_gpus(count: int, counted: str = "GPUs") -> tuple[str, ...]:
    """The note on a source with launches of so many GPUs, if it has those of several."""
    if count < 2:
        return ()
    return (
        f"it has launches of {count} {counted}: "
        "busy is the time in which any of them is, and a gap one of all",
    )

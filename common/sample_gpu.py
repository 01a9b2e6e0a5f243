"""Utilization, power, memory and clocks of the GPUs while a command runs, as the vendor's tool reports them.

Each sample starts nvidia-smi or amd-smi once, whichever is there and reports a GPU. Utilization is the share of time in which any
kernel ran, not how well it used the GPU: one slow kernel gives 100 %. The tools answer in tens to hundreds of milliseconds and
average power and utilization themselves, so short peaks do not show.
"""

import csv
import io
import json
import re
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from common import signals
from common.errors import UsageError
from common.files import writable_file, write_text

MEASURED = ("utilization_percent", "power_w", "memory_mib", "clock_mhz", "memory_clock_mhz")
COLUMNS = ("seconds", "gpu", *MEASURED)
ANSWER = 20.0  # seconds after which a tool counts as failed; without persistence mode it may take some seconds a GPU
NAP = 0.05  # seconds after which it looks whether the command or a signal has ended the sampling
AMD_PLACES = (  # of MEASURED in an answer of amd-smi
    ("usage", "gfx_activity"), ("power", "socket_power"), ("mem_usage", "used_vram"), ("clock", "gfx_0", "clk"),
    ("clock", "mem_0", "clk"),
)  # fmt: skip

Row = list[float | str | None]  # under COLUMNS; None where the tool does not say


def nvidia_smi(text: str) -> list[Row]:
    """The number of each GPU and its MEASURED, from lines such as `0, 87, 412.31, 20480, 1980, [N/A]`."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [[gpu, *map(_number, values)] for gpu, *values in rows if len(values) == len(MEASURED)]


def amd_smi(text: str) -> list[Row]:
    """The same from a list of GPUs, which ROCm 7 puts under `gpu_data`, and above which warnings may stand; its MB are MiB."""
    start = re.search(r"^(\[\s*[{\n]|\{)", text, re.MULTILINE)
    found = json.loads(text[start.start() :] if start else text)
    gpus = found["gpu_data"] if isinstance(found, dict) else found
    return [[str(gpu["gpu"]), *(_number(_at(gpu, place)) for place in AMD_PLACES)] for gpu in gpus]


def _number(value: object) -> float | None:
    """The number in a value: 412.31, "412.31 W", {"value": 412.31, "unit": "W"}; None of "N/A"."""
    text = str(value.get("value") if isinstance(value, dict) else value)
    match = re.search(r"-?\d+(\.\d+)?", text)
    return float(match.group()) if match else None


def _at(content: object, place: tuple[str, ...]) -> object:
    for key in place:
        content = content.get(key) if isinstance(content, dict) else None
    return content


QUERY = "index,utilization.gpu,power.draw,memory.used,clocks.sm,clocks.mem"
TOOLS = {  # name: its arguments, and what reads its output
    "nvidia-smi": ([f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], nvidia_smi),
    "amd-smi": (["metric", "--usage", "--power", "--clock", "--mem-usage", "--json"], amd_smi),
}


def read(tool: str) -> list[Row]:
    """One sample of each GPU; none if the tool fails, as without a driver, or if its answer is late or in another form."""
    arguments, parse = TOOLS[tool]
    try:
        done = subprocess.run([tool, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=ANSWER)
        return [] if done.returncode else parse(done.stdout)
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return []


def find() -> str:
    """The first tool that is there and reports a GPU. UsageError: there is none."""
    for tool in TOOLS:
        if shutil.which(tool) and read(tool):
            return tool
    raise UsageError(f"none of {', '.join(TOOLS)} was found in PATH and reports a GPU, so there is nothing to sample")


def run(command: list[str], interval_ms: int, output: Path) -> tuple[int, str, list[Row]]:
    """Samples until the command ends, or without one until a signal, and writes the CSV file in any case.

    The command gets the signal, which ends the sampling, and is waited for. Returns its exit code (128 + n if signal n ended it,
    0 without a command), the tool, and the rows of the file. UsageError: no tool reports a GPU, or there is no such command.
    """
    tool, output = find(), writable_file(output, "--output")
    if command and not shutil.which(command[0]):
        raise UsageError(f"there is no command {command[0]}")
    rows: list[Row] = []
    try:
        with signals.deferred() as received:
            process = subprocess.Popen(command, start_new_session=True) if command else None  # it gets no Ctrl-C but ours
            start = due = time.monotonic()
            while not received and (process is None or process.poll() is None):
                if (rest := due - time.monotonic()) > 0:
                    time.sleep(min(rest, NAP))
                    continue
                began = time.monotonic()
                rows += [[began - start, *row] for row in read(tool)]
                due = began + interval_ms / 1e3
            if process and received:
                process.send_signal(received[0])
            code = process.wait() if process else 0
    finally:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
        write_text(output, text.getvalue())
    return 128 - code if code < 0 else code, tool, rows


def summary(rows: list[Row]) -> list[Row]:
    """GPU, quantity, its smallest, median and largest value, and number of samples, of each quantity that the tool gave."""
    lines = []
    for gpu in dict.fromkeys(row[1] for row in rows):
        of_gpu = [row for row in rows if row[1] == gpu]
        for column, name in enumerate(MEASURED, start=2):
            if values := [value for row in of_gpu if isinstance(value := row[column], float | int)]:
                lines.append([gpu, name, min(values), statistics.median(values), max(values), len(values)])
    return lines

"""Utilization, power, memory and clocks of the GPUs while a command runs, as the vendor's tool reports them.

Each sample starts nvidia-smi, amd-smi or rocm-smi once, whichever is there and reports a GPU. Utilization is the share of time in
which any kernel ran, not how well it used the GPU: one slow kernel gives 100 %. The tools answer in tens to hundreds of
milliseconds and average power and utilization themselves, so short peaks do not show.
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
from typing import Any

from common import signals
from common.errors import UsageError
from common.files import writable_file, write_text

MEASURED = ("utilization_percent", "power_w", "memory_mib", "clock_mhz", "memory_clock_mhz")
COLUMNS = ("seconds", "gpu", *MEASURED)
ANSWER = 20.0  # seconds after which a tool counts as failed; without persistence mode it may take some seconds a GPU
NAP = 0.05  # seconds after which it looks whether the command or a signal has ended the sampling

Sample = dict[str, float | None]  # MEASURED of one GPU; None where the tool does not say
Row = list[float | str | None]  # under COLUMNS


def nvidia_smi(text: str) -> dict[str, Sample]:
    """Lines such as `0, 87, 412.31, 20480, 1980, 2619`; a value can be [N/A] or [Not Supported]."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return {gpu: dict(zip(MEASURED, map(_number, values), strict=True)) for gpu, *values in rows}


def amd_smi(text: str) -> dict[str, Sample]:
    """A list of GPUs, which ROCm 7 puts under `gpu_data`; its MB are MiB."""
    found = _json(text)
    gpus = found["gpu_data"] if isinstance(found, dict) else found
    places = (("usage", "gfx_activity"), ("power", "socket_power"), ("mem_usage", "used_vram"), ("clock", "gfx_0", "clk"),
              ("clock", "mem_0", "clk"))  # fmt: skip
    return {str(gpu["gpu"]): dict(zip(MEASURED, (_number(_at(gpu, place)) for place in places), strict=True)) for gpu in gpus}


def rocm_smi(text: str) -> dict[str, Sample]:
    """An object of cards; power has one of two names, and memory is in bytes."""
    found = {}
    for card, values in _json(text).items():
        if card.startswith("card"):
            power = next((value for key, value in values.items() if key.endswith("Graphics Package Power (W)")), None)
            memory = _number(values.get("VRAM Total Used Memory (B)"))
            clocks = (_number(values.get(f"{name} clock speed:")) for name in ("sclk", "mclk"))
            measured = _number(values.get("GPU use (%)")), _number(power), memory and memory / 2**20, *clocks
            found[card.removeprefix("card")] = dict(zip(MEASURED, measured, strict=True))
    return found


QUERY = "index,utilization.gpu,power.draw,memory.used,clocks.sm,clocks.mem"
TOOLS = {  # name: its arguments, and what reads its output
    "nvidia-smi": ([f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], nvidia_smi),
    "amd-smi": (["metric", "--usage", "--power", "--clock", "--mem-usage", "--json"], amd_smi),
    "rocm-smi": (["--showuse", "--showpower", "--showmeminfo", "vram", "--showclocks", "--json"], rocm_smi),
}


def _json(text: str) -> Any:
    """The JSON in a tool's output. amd-smi prints warnings above it, such as one about groups that the user is not in."""
    start = re.search(r"^(\[\s*[{\n]|\{)", text, re.MULTILINE)
    return json.loads(text[start.start() :] if start else text)


def _number(value: object) -> float | None:
    """The number in a value: 412.31, "412.31 W", "(1980Mhz)", {"value": 412.31, "unit": "W"}; None of "N/A"."""
    text = str(value.get("value") if isinstance(value, dict) else value)
    match = re.search(r"-?\d+(\.\d+)?", text)
    return float(match.group()) if match else None


def _at(content: object, place: tuple[str, ...]) -> object:
    for key in place:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def read(tool: str) -> dict[str, Sample]:
    """One sample of each GPU, by its number; none if the tool fails, as without a driver, or if its answer is late or strange."""
    arguments, parse = TOOLS[tool]
    process = subprocess.Popen([tool, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
    try:
        text, _ = process.communicate(timeout=ANSWER)
        return parse(text) if process.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        process.kill()  # and no wait: a tool that hangs in the driver does not end
        return {}
    except (ValueError, LookupError, TypeError, AttributeError):  # a message in place of an answer
        return {}


def find() -> str:
    """The first tool that is there and reports a GPU. UsageError: there is none."""
    for tool in TOOLS:
        if shutil.which(tool) and read(tool):
            return tool
    raise UsageError(f"none of {', '.join(TOOLS)} was found in PATH and reports a GPU, so there is nothing to sample")


def run(command: list[str], interval_ms: int, output: Path) -> tuple[int, str, list[Row]]:
    """Samples until the command ends, or without one until a signal, and writes the CSV file in any case.

    The command gets the first signal, which ends the sampling, and is waited for. A second one reaches it too, and ends the wait.
    Returns its exit code (128 + n if signal n ended it, 0 without a command), the tool, and the rows of the file. UsageError: no
    tool reports a GPU, the command cannot be started, or the file cannot be written.
    """
    tool, output = find(), writable_file(output, "--output")
    if command and not shutil.which(command[0]):
        raise UsageError(f"there is no command {command[0]}")
    rows: list[Row] = []
    with signals.deferred() as received:
        process = subprocess.Popen(command, start_new_session=True) if command else None  # it gets no Ctrl-C but ours
        start = due = time.monotonic()
        try:
            while not received and (process is None or process.poll() is None):
                if (rest := due - time.monotonic()) > 0:
                    time.sleep(min(rest, NAP))
                    continue
                began = time.monotonic()
                rows += [[began - start, gpu, *(sample[name] for name in MEASURED)] for gpu, sample in read(tool).items()]
                due = began + interval_ms / 1e3
            if process and received:
                process.send_signal(received[0])
            code = process.wait() if process else 0
        except signals.Stopped as stop:
            if process:
                process.send_signal(stop.number)
            raise
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

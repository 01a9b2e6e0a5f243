"""The link between processes that the model on paper takes: given, or measured by all-reduces of several sizes.

The all-reduces run between the smallest number of processes above one. Run as a module, it is each of these processes.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import cli, files, ranks
from common import device as devices
from common.analysis.formulas import data_parallel
from common.records.study_files import Link
from common.studies.scaling import torchrun
from common.studies.scaling.torchrun import ScalingOptions
from common.timing import benchmark, summarize
from common.training import distributed

import torch

MESSAGE_BYTES = {"cpu": (2**12, 2**16, 2**20, 2**22), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
REPEATED = 10  # all-reduces that are timed together


def find(options: ScalingOptions, needed: bool) -> tuple[Link | None, str | None]:
    """The link of the model on paper, given or from all-reduces; None if nothing needs it, or if that failed, and then why."""
    flags = {"gb_per_second": options.link_gbs, "microseconds": options.link_us}
    given = {name: value for name, value in flags.items() if value is not None}
    if len(given) == 2:
        return _link(data_parallel.Link(**given), "given", []), None
    if not needed:
        return None, None
    processes = min({*options.processes} - {1})
    with tempfile.TemporaryDirectory() as name:
        result = Path(name, "link.json")
        command = ["-m", __name__, str(result), options.device, str(options.timeout)]
        code, said = torchrun.run(processes, command, options, Path(name))
        if code != 0:
            return None, f"the link was not measured: {torchrun.ending(code, said, options)['reason']}"
        messages = files.read_json(result)
    found = data_parallel.link_of([(each["bytes"], each["ms"]) for each in messages], processes)
    source = f"all-reduces between {processes} processes" + "".join(f"; {name} given" for name in given)
    return _link(found._replace(**given), source, messages), None


def _link(found: data_parallel.Link, source: str, messages: list[dict[str, float]]) -> Link:
    return {
        "gb_per_second": found.gb_per_second, "microseconds": found.microseconds, "source": source, "messages": messages,
    }  # fmt: skip


def main() -> None:
    """Times all-reduces in each process of a torchrun job; the first writes them."""
    path, device, timeout = Path(sys.argv[1]), devices.select(sys.argv[2]), float(sys.argv[3])
    distributed.start("ddp", device, timeout, captured=True)
    messages = []
    for nbytes in MESSAGE_BYTES[device.type]:
        message = torch.zeros(nbytes // 4, device=device)
        times = benchmark(_repeated(partial(torch.distributed.all_reduce, message), device), device)
        messages.append({"bytes": nbytes, "ms": summarize(times)["median"] / REPEATED})
    if ranks.here().main_process:
        files.write_json(path, messages)
    torch.distributed.destroy_process_group()


def _repeated(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Does it REPEATED times; on a GPU as one graph, because the host launches slower than a small message passes a link."""
    if devices.is_gpu(device):
        return devices.capture_graph(work, REPEATED, collectives=True)
    return lambda: [work() for _ in range(REPEATED)]


if __name__ == "__main__":
    cli.command(main)

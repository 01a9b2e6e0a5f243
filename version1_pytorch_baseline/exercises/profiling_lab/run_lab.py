"""Measures all parts of this lab on this machine and writes them to a file.

    python run_lab.py --output profiling_lab.json
    python run_lab.py --output mine.json --implementation starter --parts components optimizations
    python ../../../page.py profiling_lab.json --output profiling_lab.html

It takes minutes. The file is written after each row, so a part that a signal ended holds the rows before it. A part that was not
requested, or not reached, is null in the file; `page.py` makes a page of the others.

`common/records/lab_file.py` has the fields of the file. Times are in ms, memory is in MB of 2^20 bytes. All parts but the last
three are in fp16 on a GPU and in fp32 on a CPU. The parts over sequence lengths have a batch of 1 and a head dimension of D / H.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import importlib
import importlib.metadata
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from types import ModuleType
from typing import Any

from common import cli
from common import device as devices
from common.analysis.output import tables
from common.documents.lab_dashboard import PARTS
from common.errors import UsageError
from common.files import writable_file, write_measurement
from common.progress import progress
from common.records.fields import Ceilings
from common.records.lab_file import SCHEMA, PartName
from common.training import record

import experiments
import toolkit
import torch
from toolkit import FOLDERS, jax_runs_on


def load(implementation: str) -> ModuleType:
    """`profiling` from the folder of the starter or of the solution."""
    sys.path.insert(0, str(FOLDERS[implementation]))
    return importlib.import_module("profiling")


def command(main: Callable[[], None]) -> None:
    """`cli.command`, for which a function that is still to be written is wrong input."""

    def refusing() -> None:
        try:
            main()
        except NotImplementedError as error:
            raise UsageError(f"not implemented: {error}") from error

    cli.command(refusing)


def measurements(profiling: ModuleType, options: Namespace, device: torch.device, peaks: Ceilings) -> dict[PartName, Callable]:
    """A function for each part, in the order in which they run. It yields what the part has measured so far, after each row."""
    kind, heads, head_dim = device.type, options.num_heads, options.d_model // options.num_heads
    version1 = experiments.resolve(Namespace(preset=options.preset, device=kind, num_steps=options.num_steps))
    sizes = (options.seq_len, options.d_model, heads, options.batch_size, kind)

    def classed(results: list) -> list[dict[str, Any]]:
        bounds = (profiling.classify_bound(result, peaks["flops_per_second"], peaks["bytes_per_second"]) for result in results)
        return [asdict(result) | {"bound": bound} for result, bound in zip(results, bounds, strict=True)]

    def components() -> Iterator[dict[str, Any]]:
        jax = classed(profiling.profile_attention_components_jax(*sizes)) if jax_runs_on(device) else None
        yield {"pytorch": classed(profiling.profile_attention_components(*sizes)), "jax": jax}

    def over_lengths(compare: Callable) -> Iterator[dict[str, Any]]:
        return ({"seq_len": length, "ms": compare(1, heads, length, head_dim, kind)} for length in options.seq_lens)

    def memory() -> Iterator[dict[str, Any]]:
        for length in options.seq_lens:
            yield from profiling.memory_curve([length], heads=heads, d_k=head_dim, device=kind)

    return {
        "components": components,
        "optimizations": lambda: growing(over_lengths(profiling.compare_optimizations)),
        "frameworks": lambda: growing(over_lengths(profiling.compare_frameworks)),
        "memory": lambda: growing(memory()),
        "bottlenecks": lambda: growing(experiments.bottlenecks(device)),
        "fixes": lambda: growing(experiments.fixes(version1)),
        "layer": lambda: [experiments.layer(version1)],
    }


def growing(found: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, after each."""
    rows = []
    for row in found:
        rows.append(row)
        yield rows


def main() -> None:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE.json")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    add("--implementation", choices=FOLDERS, default="solution", help="whose profiling.py (default: solution)")
    add("--batch-size", type=cli.positive, default=8, metavar="B", help="of the components (default: 8)")
    add("--seq-len", type=cli.positive, default=512, metavar="S", help="of the components (default: 512)")
    add("--d-model", type=cli.positive, default=512, metavar="D", help="default: 512")
    add("--num-heads", type=cli.positive, default=8, metavar="H", help="default: 8")
    add("--seq-lens", type=cli.positive_list, default=[128, 512, 2048], metavar="S,S,...", help="default: 128,512,2048")
    experiments.add_flags(parser)
    options = parser.parse_args()
    if options.d_model % options.num_heads:
        raise UsageError(f"--d-model {options.d_model} is not divisible by --num-heads {options.num_heads}")
    writable_file(options.output, "--output")

    device = devices.select(options.device)
    devices.prepare(device, seed=0)
    profiling, peaks = load(options.implementation), toolkit.peaks(device)
    sizes = ("batch_size", "seq_len", "d_model", "num_heads", "seq_lens", "preset")
    result = record.header(SCHEMA, device) | {
        "jax": importlib.metadata.version("jax") if jax_runs_on(device) else None,
        "precision": peaks["precision"], "sizes": {name: getattr(options, name) for name in sizes}, "ceilings": peaks,
    }  # fmt: skip
    result |= dict.fromkeys(map(str, PARTS))
    for part, run in measurements(profiling, options, device, peaks).items():
        if part in options.parts:
            with progress(part):
                for result[part] in run():
                    write_measurement(options.output, result, "--output")
            print(f"{part}\n{tables.text(*PARTS[part].rows(result[part]))}\n", flush=True)
    print(f"written: {options.output}")


if __name__ == "__main__":
    command(main)

"""Measures all parts of this lab on this machine and writes them to a file.

    python run_lab.py --output profiling_lab.json
    python run_lab.py --output mine.json --implementation starter --parts components optimizations
    python report.py profiling_lab.json --output profiling_lab.html

It takes minutes. The file is written after each row, so a part that a signal ended holds the rows before it. A part that was not
requested, or not reached, is null in the file; `report.py` makes a page of the others.

`common/records/lab_file.py` has the fields of the file. Times are in ms, memory is in MB of 2^20 bytes. All parts but the last
three are in fp16 on a GPU and in fp32 on a CPU. The parts over sequence lengths have a batch of 1 and a head dimension of D / H.
"""

import importlib
import importlib.metadata
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from common import cli
from common import device as devices
from common.analysis.output import tables
from common.documents.lab_dashboard import PARTS
from common.errors import UsageError
from common.files import writable_file, write_measurement
from common.precision import Precision
from common.progress import progress
from common.records.fields import Ceilings
from common.records.lab_file import SCHEMA, PartName
from common.training import ceilings, record

import experiments
import torch
from toolkit import FOLDERS, jax_runs_on


def load(implementation: str) -> ModuleType:
    """`profiling` from the folder of the starter or of the solution."""
    sys.path.insert(0, str(FOLDERS[implementation]))
    return importlib.import_module("profiling")


def measurements(profiling: ModuleType, options: Namespace, device: torch.device, peaks: Ceilings) -> dict[PartName, Callable]:
    """A function for each part that measures it, in the order in which they run; a part that is a list gives a row at a time."""
    kind, heads, head_dim = device.type, options.num_heads, options.d_model // options.num_heads
    version1 = experiments.resolve(Namespace(preset=options.preset, device=kind, num_steps=options.num_steps))
    sizes = (options.seq_len, options.d_model, heads, options.batch_size, kind)

    def classed(results: list) -> list[dict[str, Any]]:
        bounds = (profiling.classify_bound(result, peaks["flops_per_second"], peaks["bytes_per_second"]) for result in results)
        return [asdict(result) | {"bound": bound} for result, bound in zip(results, bounds, strict=True)]

    def components() -> dict[str, Any]:
        jax = classed(profiling.profile_attention_components_jax(*sizes)) if jax_runs_on(device) else None
        return {"pytorch": classed(profiling.profile_attention_components(*sizes)), "jax": jax}

    def over_lengths(compare: Callable) -> Iterator[dict[str, Any]]:
        return ({"seq_len": length, "ms": compare(1, heads, length, head_dim, kind)} for length in options.seq_lens)

    def memory() -> Iterator[dict[str, Any]]:
        for length in options.seq_lens:
            yield from profiling.memory_curve([length], heads=heads, d_k=head_dim, device=kind)

    return {
        "components": components,
        "optimizations": lambda: over_lengths(profiling.compare_optimizations),
        "frameworks": lambda: over_lengths(profiling.compare_frameworks),
        "memory": memory,
        "bottlenecks": lambda: experiments.bottlenecks(device),
        "fixes": lambda: experiments.fixes(version1),
        "layer": lambda: experiments.layer(version1),
    }


def growing(found: dict[str, Any] | Iterable[dict[str, Any]]) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:
    """What is measured of a part, whenever it has grown by a row; a part that is no list comes whole."""
    rows = []
    for row in [] if isinstance(found, dict) else found:
        rows.append(row)
        yield rows
    if isinstance(found, dict):
        yield found


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--implementation", choices=FOLDERS, default="solution", help="whose profiling.py (default: solution)")
    parser.add_argument("--batch-size", type=cli.positive, default=8, metavar="B", help="of the components (default: 8)")
    parser.add_argument("--seq-len", type=cli.positive, default=512, metavar="S", help="of the components (default: 512)")
    parser.add_argument("--d-model", type=cli.positive, default=512, metavar="D", help="default: 512")
    parser.add_argument("--num-heads", type=cli.positive, default=8, metavar="H", help="default: 8")
    parser.add_argument(
        "--seq-lens", type=cli.positive_list, default=[128, 512, 2048], metavar="S,S,...", help="default: 128,512,2048"
    )
    experiments.add_flags(parser)
    options = parser.parse_args()
    if options.d_model % options.num_heads:
        raise UsageError(f"--d-model {options.d_model} is not divisible by --num-heads {options.num_heads}")
    writable_file(options.output, "--output")

    device = devices.select(options.device)
    devices.prepare(device, seed=0)
    precision = Precision(device, torch.float16 if devices.is_gpu(device) else None)
    profiling, peaks = load(options.implementation), ceilings.measure(device, precision)
    sizes = ("batch_size", "seq_len", "d_model", "num_heads", "seq_lens", "preset")
    result = record.header(SCHEMA, device) | {
        "jax": importlib.metadata.version("jax") if jax_runs_on(device) else None,
        "precision": precision.name, "sizes": {name: getattr(options, name) for name in sizes}, "ceilings": peaks,
    }  # fmt: skip
    result |= dict.fromkeys(map(str, PARTS))
    for part, run in measurements(profiling, options, device, peaks).items():
        if part in options.parts:
            with progress(part):
                for result[part] in growing(run()):
                    write_measurement(options.output, result, "--output")
            print(f"{part}\n{tables.text(*PARTS[part].rows(result[part]))}\n", flush=True)
    print(f"written: {options.output}")


if __name__ == "__main__":
    cli.command(main)

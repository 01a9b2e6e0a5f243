"""Measures weak scaling over processes, each with a GPU of its own (on a CPU: gloo).

    python scaling_study.py --preset large --use-amp --models v1,v4 --parallel ddp,zero1,fsdp --processes 1,2,4
    python scaling_study.py --device cpu --processes 1,2 --num-steps 5 --repeats 1

Each process keeps its batch (--batch-size). Each cell is a torchrun job of the version's script. One process is always measured,
because efficiency is against it. A form that a version does not support is left out with a line.

Writes scaling.json (measured), and from it scaling.csv, .html and .md, into --output-dir.
The exit code is 1 if a job failed for another reason than memory, and the other cells are measured all the same.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli
from common import device as devices
from common.files import writable_file
from common.studies import known_models, scaling
from common.training import version_files

KINDS = ("csv", "html", "json", "md")


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def main() -> int:
    parser = version_files.parser(__doc__)
    add = parser.add_argument
    add("--models", type=names, default=["v1", "v4"], metavar="NAMES", help="default: v1,v4")
    add("--parallel", dest="forms", type=names, default=["ddp", "zero1", "fsdp"], metavar="FORMS", help="default: ddp,zero1,fsdp")
    add("--processes", type=cli.positive_list, metavar="LIST", help="default: 1, 2, 4, ... up to the GPUs here; 1,2 on a CPU")
    add("--num-steps", type=cli.positive, default=30, metavar="N", help="timed, in each job (default: 30)")
    add("--repeats", type=cli.positive, default=3, metavar="N", help="jobs a cell, in turn (default: 3)")
    add("--timeout", type=cli.positive, default=600, metavar="SECONDS", help="of each job (default: 600)")
    cli.add_output_dir(parser, "scaling_study")
    arguments = cli.parse(parser)
    arguments.processes = arguments.processes or scaling.default_processes(devices.select(arguments.device))
    known = known_models.find()
    options, cells, left_out = scaling.plan(arguments, known)
    path = writable_file(arguments.output_dir / "scaling.json", "--output-dir")
    for line in left_out:
        print(f"leaves out {line}")
    code = scaling.measure(arguments, options, cells, left_out, known)
    print(f"\n{scaling.analyze(path).publish(arguments.output_dir, 'scaling', KINDS)}")
    return code


if __name__ == "__main__":
    cli.command(main)

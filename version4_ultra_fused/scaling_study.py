"""Measures weak and strong scaling over processes, each with a GPU of its own (on a CPU: gloo), beside a model on paper.

    python scaling_study.py --preset large --use-amp --models v1,v4 --parallel ddp,zero1,fsdp --processes 1,2,4
    python scaling_study.py --device cpu --processes 1,2 --num-steps 5 --repeats 1
    python scaling_study.py --preset medium --use-amp --link-gbs 300 --link-us 5

Weak scaling keeps the batch of a process (--batch-size), strong scaling that of the job (--global-batch-size). Each cell is a
torchrun job of the version's script. One process is always measured, because efficiency is against it. A form that a version does
not support is left out with a line. With --fill-gpus, jobs that need few GPUs run side by side. The model predicts from the step
on one GPU and a link, which is measured unless both --link-gbs and --link-us are given.

Writes scaling.json (measured), and from it scaling.csv, .html, .md and .png, into --output-dir.
The exit code is 1 if a job failed for another reason than memory, and the other cells are measured all the same.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from dataclasses import replace

from common import cli
from common import device as devices
from common.errors import UsageError
from common.files import writable_file
from common.studies import known_models
from common.studies.scaling import scaling_cells, scaling_report
from common.studies.scaling.torchrun import ScalingOptions
from common.training import version_files

KINDS = ("csv", "html", "json", "md", "png")


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def main() -> int:
    parser = version_files.parser(__doc__)
    add = parser.add_argument
    add("--models", type=names, default=["v1", "v4"], metavar="NAMES", help="default: v1,v4")
    add("--parallel", dest="forms", type=names, default=["ddp", "zero1", "fsdp"], metavar="FORMS", help="default: ddp,zero1,fsdp")
    add("--processes", type=cli.positive_list, metavar="LIST", help="default: 1, 2, 4, ... up to the GPUs here; 1,2 on a CPU")
    add("--global-batch-size", type=cli.positive, metavar="N", help="of strong scaling (default: --batch-size)")
    add("--num-steps", type=cli.positive, default=30, metavar="N", help="timed, in each job (default: 30)")
    add("--profile-steps", type=cli.positive, default=3, metavar="N", help="after these, once a cell (default: 3)")
    add("--repeats", type=cli.positive, default=3, metavar="N", help="jobs a cell, in turn (default: 3)")
    shared = "run jobs at the same time, each on GPUs of its own: faster, but they share the host"
    add("--fill-gpus", action="store_true", help=shared)
    add("--timeout", type=cli.positive, default=600, metavar="SECONDS", help="of each job (default: 600)")
    add("--link-gbs", type=cli.amount, metavar="GB/S", help="of a link in each direction (default: measured)")
    add("--link-us", type=cli.amount, metavar="US", help="latency of a link (default: measured)")
    add("--keep-traces", action="store_true", help="keep the profiles of all cells in traces/ of --output-dir")
    cli.add_output_dir(parser, "scaling_study")
    arguments = parser.parse_args()
    arguments.processes = arguments.processes or scaling_cells.default_processes(devices.select(arguments.device))
    options = cli.resolve(ScalingOptions, arguments)
    if options.link_gbs == 0:
        raise UsageError("--link-gbs: 0 GB/s would take for ever: give a number above 0")
    options = replace(options, global_batch_size=options.global_batch_size or options.batch_size)
    known = known_models.find()
    cells, left_out = scaling_cells.plan(options, known)
    path = writable_file(options.output_dir / "scaling.json", "--output-dir")
    for line in left_out:
        print(f"leaves out {line}")
    code = scaling_cells.measure(cells, left_out, options, known, path)
    print(f"\n{scaling_report.analyze(path).publish(options.output_dir, 'scaling', KINDS)}")
    return code


if __name__ == "__main__":
    cli.command(main)

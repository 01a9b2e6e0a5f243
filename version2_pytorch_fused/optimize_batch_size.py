"""Searches a batch size for Version 2: by throughput, by samples that cost no time, or by memory.

    python optimize_batch_size.py --target-memory-usage 0.8 --optimization-target throughput
    python optimize_batch_size.py --optimization-target memory --disable-flash-attention

Flags that are not listed here go to the version. Each batch size is tried in a process of its own,
so that running out of memory ends a trial and not the search. Writes batch_search.json (measured)
after each trial, and from it, at the end or after Ctrl-C, batch_search.csv and .md, into
--output-dir.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from studies import batch_size, version_files
from tracepage.files import writable_file
from tracepage.views.batch_size_search import render_batch_search
from version2_pytorch_fused import tiny_llama_v2


def main() -> int:
    parser = version_files.parser(__doc__, "--batch-size")
    cli.add(parser, "--checkpoint-activations")
    add = parser.add_argument
    maximum = batch_size.MAXIMUM
    searched = "what to search for (default: throughput)"
    add("--optimization-target", choices=batch_size.TARGETS, default="throughput", help=searched)
    share = "share of the device's memory for the peak, above 0 and at most 1 (default: 0.9)"
    add("--target-memory-usage", type=float, default=0.9, help=share)
    add("--max-batch-size", type=cli.positive, default=maximum, help=f"default: {maximum}")
    cli.add_output_dir(parser, "batch_size_search")
    arguments, own_flags = cli.parse_known(parser)
    path = writable_file(
        arguments.output_dir / "batch_search.json", "--output-dir", (arguments.config,)
    )
    code = batch_size.measure(tiny_llama_v2, arguments, own_flags, path)
    print(f"\n{render_batch_search(path).publish(path.parent, path.stem)}")
    return code


if __name__ == "__main__":
    cli.command(main)

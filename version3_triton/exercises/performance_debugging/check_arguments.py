"""Checks the arguments of runs before the first one starts; exit code 2 if a script does not take them.

python check_arguments.py ../../../version1_pytorch_baseline/tiny_llama_v1.py v3_stage5_optimized.py -- --num-steps 50
"""

import sys
from importlib import import_module
from pathlib import Path

from common import cli
from common.training import version_files

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("scripts", nargs="+", type=Path, metavar="SCRIPT")
    own = sys.argv[1:]
    end = own.index("--") if "--" in own else len(own)
    for path in parser.parse_args(own[:end]).scripts:
        if path.resolve().parent == HERE:
            import_module(path.stem).STAGE.options(own[end + 1 :])
        else:
            version = version_files.load(path)
            version_files.run_options(version, version_files.run_parser(version, None).parse_args(own[end + 1 :]))


if __name__ == "__main__":
    cli.command(main)

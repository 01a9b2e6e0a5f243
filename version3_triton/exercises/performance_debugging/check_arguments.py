"""Checks the arguments of runs before the first one starts; exit code 2 if a script does not take them.

python check_arguments.py ../../../version1_pytorch_baseline/tiny_llama_v1.py v3_stage5_optimized.py -- --num-steps 50
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from importlib import import_module

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

"""Makes an HTML page of the file that run_lab.py writes, or compares two such files; the page needs no network and no script.

python report.py profiling_lab.json --output profiling_lab.html
python report.py ../../../results/cpu/profiling_lab.json profiling_lab.json --output profiling_lab.devices.html
"""

from pathlib import Path

from common import cli
from common.documents import lab_dashboard
from common.files import read, writable_file, write_text
from common.records import lab_file


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("results", type=Path, metavar="FILE.json", help="from run_lab.py")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER.json", help="of another device: both side by side")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.html")
    options = parser.parse_args()
    results = read(options.results, lab_file.Lab)
    if options.other:
        page = lab_dashboard.compare(results, read(options.other, lab_file.Lab))
        print(page.terminal())
    else:
        page = lab_dashboard.page(results)
    write_text(writable_file(options.output, "--output"), page.html())
    print(f"written: {options.output}")


if __name__ == "__main__":
    cli.command(main)

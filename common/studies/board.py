"""The board of a room: the races of all race_*.json in a folder, by device, as Markdown and as a page that needs no network.

make board DIR=races
"""

from operator import itemgetter
from pathlib import Path

from common import cli, files
from common.analysis.output import run_facts, tables
from common.analysis.output.report import Report
from common.errors import UsageError
from common.records.workshop_files import Race


def report(paths: list[Path]) -> Report:
    """A section for each device and its conditions: the lowest held-out loss comes first, who was refused last."""
    result, groups = Report("Race"), dict[str, list[Race]]()
    for race in (files.read(path, Race) for path in paths):
        where = (
            f"{run_facts.device(race)}, {race['precision']['compute']}, torch {race['environment']['torch']}: {race['preset']} "
            f"({tables.letters(race['model'])})"
        )
        shape = f"batch size {race['batch_size']}, sequence length {race['sequence_length']}, {race['minutes']:g} minutes"
        groups.setdefault(f"{where}, {shape}, {race['data']} ({race['data_sha256'][:8]})", []).append(race)
    for place, races in sorted(groups.items()):
        result.section(place)
        rows: list[list] = [
            [race["name"], found["held_out_loss"], found["steps"], found["ms_per_step"],
             found["baseline_ms_per_step"] / found["ms_per_step"], found["checked_steps"]]
            for race in races if (found := race["result"])
        ]  # fmt: skip
        if rows:
            header = ["name", "held-out loss", "steps", "ms/step", "times as fast as Version 1", "steps checked"]
            result.table(header, sorted(rows, key=itemgetter(1)))
        if refused := [(race["name"], f"refused: {race['refused']}") for race in races if not race["result"]]:
            result.facts(refused)
    return result


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with the files of all contestants")
    folder = parser.parse_args().folder
    if not (paths := sorted(folder.glob("race_*.json"))):
        raise UsageError(f"{folder} holds no race_*.json: `make race SCRIPT=FILE` writes one")
    print(report(paths).publish(folder, "board", ("md", "html"), "DIR"))


if __name__ == "__main__":
    cli.command(main)

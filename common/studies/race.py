"""A race: how fast a script with the functions of a version trains, by an evaluator's clock, if it learns as Version 1 does.

    make race SCRIPT=version4_ultra_fused/tiny_llama_v4.py NAME=green MINUTES=5

The script runs in a process of its own (`race_contestant`). This process, the evaluator, never imports it and holds

- the clock, which runs from the moment a block of batches is sent until its losses (and weights, if asked for) are there;
- the batches, drawn by a secret seed, whose tokens have new names, so that the text on the disk helps nobody;
- a twentieth of the text, held out, on which Version 1's code evaluates the final weights.

Version 1 takes a third of the time, in such a process too. The script gets the same batches, and more, for the rest. It must have
Version 1's gradients and update in the first step, and follow its loss curve as far as that goes. Later blocks are drawn when
their losses are known: Version 1 repeats them from the weights and moments before them, and must get the same. A script may
neither stand for more FLOP/s than the device can reach, nor replace the timer.
"""

import hashlib
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common import cli, data
from common import device as devices
from common.analysis.formulas import flops, peaks
from common.analysis.output import tables
from common.data import Batches, Dataset
from common.errors import RunError, UsageError
from common.files import schema_of, writable_file, write_measurement
from common.options import Options
from common.precision import Precision
from common.records.workshop_files import Race, Result
from common.studies import board, known_models, race_contestant
from common.studies.race_contestant import KINDS
from common.training import capture, ceilings, record, version_files

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

BASELINE_SHARE = 1 / 3  # of the time
PARTS, HELD_OUT = 400, 20  # the text is cut into parts, of which each 20th is held out
BATCHES, HELD_OUT_BATCHES = 2**18, 32
BLOCK_SECONDS, SHORTEST, LONGEST = 1.0, 4, 32  # of a block, and steps in it: rounding differences grow from step to step
CHECKS = 4  # blocks that are checked, about, beside the first two and the last
WINDOW = 50  # steps over which the difference of two curves is averaged: results/h200/curve_v*.json then differ by up to 0.011
PATIENCE = 900  # seconds for an answer, which may have to compile first
SLACK = 1.0  # seconds by which a clock may lag behind twice its own time
UNLISTED = 2  # times the measured matrix product: no step reaches that, where no data sheet is listed
TOLERANCES = {  # of rounding: losses and curves in nats, the gradient and the update of a tensor in relation to themselves
    "fp32": {"loss": 5e-3, "curve": 0.05, "gradient": 0.02, "update": 0.3},
    "bf16": {"loss": 0.05, "curve": 0.05, "gradient": 0.2, "update": 0.9},  # AdamW's first update is a sign
}


class Refused(RunError):
    """The script gets no result; the message says why."""


class Entry(NamedTuple):
    """What a script did."""

    losses: list[float]
    ms_per_step: float
    state: dict[str, Tensor]  # after the last block


@contextmanager
def contestant(script: Path, options: Options) -> Iterator[Callable[..., bytes]]:
    """A script's process, when it is ready; yields a function that sends it a block or None, and returns its answer."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=race_contestant.serve, args=(theirs, script, options))
    process.start()
    theirs.close()

    def ask(*messages: np.ndarray | None) -> bytes:
        try:
            for message in messages:
                ours.send(message)
            answer = ours.recv_bytes() if ours.poll(PATIENCE) else b""
        except (EOFError, OSError) as error:
            raise Refused("its process has ended") from error
        if answer[:1] == race_contestant.OK:
            return answer[1:]
        said = answer[1:].decode() or "it gave no answer"
        raise UsageError(said) if answer[:1] == race_contestant.REFUSED else Refused(said)

    try:
        ask()
        yield ask
    finally:
        ours.close()
        process.kill()
        process.join()


class Evaluator:
    """The clock, the text, and Version 1; `worst` are the largest errors, and `checked` the steps that Version 1 has repeated."""

    def __init__(self, options: Options, text: Dataset) -> None:
        self.options, self.device = options, devices.select(options.device)
        devices.prepare(self.device, options.seed)
        self.precision = Precision(self.device, cli.amp_dtype(options))
        if self.precision.name not in TOLERANCES:
            raise UsageError(f"--amp-dtype {options.amp_dtype}: a race is in {' or '.join(TOLERANCES)}")
        self.worst, self.checked = dict.fromkeys(TOLERANCES[self.precision.name], 0.0), 0
        self.baseline = next(iter(known_models.version_scripts().values()))
        self.version = version_files.load(self.baseline)
        self.model = self.version.make_model(options).to(self.device)
        weights = {name: weight.clone() for name, weight in self.model.baseline_state_dict().items()}
        zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        kinds = zip(KINDS, (weights, zeros, zeros), strict=True)
        self.initial = {f"before {kind} {name}": tensor for kind, named in kinds for name, tensor in named.items()}
        names = np.random.default_rng(secrets.randbits(128)).permutation(options.model.vocab_size).astype(np.uint32)
        parts = np.array_split(names[text.tokens], PARTS)

        def batches(parts: list[np.ndarray], count: int, seed: int) -> Batches:
            dataset = replace(text, tokens=np.concatenate(parts), name=f"{text.name} ({len(parts)} of its {PARTS} parts)")
            return Batches(dataset, options.batch_size, options.seq_len, count, seed, torch.device("cpu"))

        self.batches = batches([part for i, part in enumerate(parts) if i % HELD_OUT], BATCHES, secrets.randbits(63))
        self.held_out = batches(parts[::HELD_OUT], HELD_OUT_BATCHES, 0)

    def drive(self, script: Path, seconds: float, judged: bool) -> Entry:
        """Has a script train for so many seconds, at least two blocks; raises Refused if it fails, or a check if it is judged."""
        losses: list[float] = []
        spent, training, own, count = 0.0, 0.0, 0.0, 1  # seconds in all, in its steps, and in these by its own clock; steps
        with contestant(script, self.options) as ask:
            while spent < seconds or len(losses) <= 1:
                taken = len(losses)
                block = np.stack([torch.stack(self.batches[taken + i]).int().numpy() for i in range(count)])
                start = time.perf_counter()
                clocked, *found = np.frombuffer(ask(block)).tolist()
                took = time.perf_counter() - start
                drawn = taken <= 1 or spent + took >= seconds or secrets.randbelow(2**30) < 2**30 * CHECKS * took / seconds
                state = safetensors.torch.load(ask(None)) if drawn else {}
                spent += time.perf_counter() - start if drawn else took  # so that the last block is always drawn
                training, own, losses = training + took, own + clocked / 1e3, losses + found
                if state and judged:
                    self.check(taken, block, found, state)
                count = min(max(SHORTEST, round(BLOCK_SECONDS * count / took)), LONGEST)
        if judged and 2 * own + SLACK < training:
            raise Refused(f"its clock counts {own:.3g} s where {training:.3g} s have passed: it replaced the timer")
        return Entry(losses, 1e3 * spent / len(losses), state)

    def check(self, taken: int, block: np.ndarray, losses: list[float], state: dict[str, Tensor]) -> None:
        """Repeats a block, before which the script has `taken` steps, with Version 1; compares losses, gradients and updates."""
        if missing := self.initial.keys() - state.keys():
            raise Refused(f"its baseline_state_dict lacks {min(missing).rpartition(' ')[2]}")
        start, where = (state if taken else self.initial), f"after {taken} steps"
        self._load(start, "before")
        optimizer = self.version.make_optimizer(self.model, self.options)
        for name, parameter in self.model.named_parameters():
            moments = {kind: start[f"before {kind} {name}"].to(self.device, copy=True) for kind in KINDS[1:]}
            optimizer.state[parameter] = {"step": torch.tensor(float(taken)), **moments}
        step = self.version.make_step(self.model, optimizer, self.precision)
        expected = [step((ids, targets)).item() for ids, targets in torch.from_numpy(block).to(self.device).long()]
        self._compare("loss", float(np.abs(np.subtract(expected, losses)).max()), f"{where} its losses are not Version 1's")
        for name, parameter in self.model.named_parameters():
            before, after = start[f"before weight {name}"].to(self.device), state[f"after weight {name}"].to(self.device)
            error = capture.difference([optimizer.state[parameter]["exp_avg"].cpu()], [state[f"after exp_avg {name}"]])
            self._compare("gradient", error, f"{where} the gradient of {name} is not Version 1's")
            error = capture.difference([parameter.detach() - before], [after - before])
            self._compare("update", error, f"{where} the update of {name} is not Version 1's")
        self.checked += len(block)

    def _load(self, state: dict[str, Tensor], when: str) -> None:
        self.model.load_state_dict({name: state[f"{when} weight {name}"] for name in self.model.baseline_state_dict()})

    def _compare(self, kind: str, error: float, problem: str) -> None:
        if not error <= (most := TOLERANCES[self.precision.name][kind]):
            raise Refused(f"{problem}: an error of {error:.2g}, where rounding makes at most {most:g}")
        self.worst[kind] = max(self.worst[kind], error)

    def race(self, script: Path, minutes: float) -> Result:
        """The result of a script, after Version 1 has trained; Refused: it gets none. RunError: Version 1 failed."""
        device, options = devices.describe(self.device), self.options
        listed = peaks.flops_per_second(device["name"], self.precision.name, True, device.get("multiprocessors"))
        most = listed or UNLISTED * ceilings.measure(self.device, self.precision)["flops_per_second"]
        with contestant(script, options):  # a script that cannot start is refused before Version 1 takes its time
            pass
        try:
            baseline = self.drive(self.baseline, 60 * minutes * BASELINE_SHARE, judged=False)
        except Refused as error:
            raise RunError(f"Version 1 does not train here: {error}") from error
        print(f"Version 1: {len(baseline.losses)} steps of {tables.format_time(baseline.ms_per_step)}", flush=True)
        entry = self.drive(script, 60 * minutes * (1 - BASELINE_SHARE), judged=True)
        apart = [a - b for a, b in zip(baseline.losses, entry.losses, strict=False)]
        window = min(WINDOW, len(apart))
        curve = np.abs(np.convolve(apart, np.full(window, 1 / window), "valid")).max()
        self._compare("curve", float(curve), "its loss curve is not Version 1's")
        rate = flops.training_step(options.model, options.batch_size, options.seq_len)["total"] * 1e3 / entry.ms_per_step
        if rate > most:
            raise Refused(f"its steps stand for {tables.format_rate(rate)}, and this device reaches {tables.format_rate(most)}")
        self._load(entry.state, "after")
        with torch.no_grad(), self.precision.autocast():
            pairs = [torch.stack(self.held_out[i]).to(self.device) for i in range(HELD_OUT_BATCHES)]
            held_out = sum(self.model.loss(ids, targets).item() for ids, targets in pairs) / HELD_OUT_BATCHES
        return {
            "steps": len(entry.losses), "ms_per_step": entry.ms_per_step, "baseline_ms_per_step": baseline.ms_per_step,
            "held_out_loss": held_out, "checked_steps": self.checked, "errors": self.worst,
        }  # fmt: skip


def main() -> int:
    parser = version_files.parser(__doc__)
    parser.add_argument("script", type=Path, help="has make_model, make_optimizer and make_step, as every tiny_llama_vN.py")
    parser.add_argument("--name", help="of the contestant, for the file race_NAME.json (default: the script's)")
    parser.add_argument("--minutes", type=cli.amount, default=5.0, help="of training; a third is Version 1's (default: 5)")
    parser.add_argument("--data", default="stdlib", metavar="stdlib|synthetic|FILE", help="text (default: stdlib)")
    arguments = parser.parse_args()
    options, script, name = version_files.resolve(arguments), arguments.script, arguments.name or arguments.script.stem
    if not script.is_file():
        raise UsageError(f"{script} is not a file: give a version, such as version2_pytorch_fused/tiny_llama_v2.py")
    if "/" in name:
        raise UsageError(f"--name {name}: it is a part of the file race_NAME.json, so it has no slash")
    path = writable_file(Path(f"race_{name}.json"), "--name")
    text = data.load(arguments.data, options.model.vocab_size, options.seed)
    evaluator = Evaluator(options, text)
    written = record.header(schema_of(Race), evaluator.device, evaluator.precision.name, model=options.model) | {
        "name": name, "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(), "preset": options.preset,
        "batch_size": options.batch_size, "sequence_length": options.seq_len, "minutes": arguments.minutes,
        "data": text.name, "data_sha256": text.sha256, "refused": None, "result": None,
    }  # fmt: skip
    try:
        written["result"] = evaluator.race(script.resolve(), arguments.minutes)
    except Refused as refused:
        written["refused"] = str(refused)
    write_measurement(path, written, "--name")
    print(f"{board.report([path]).terminal()}\n\nwritten: {path}")
    return int(written["result"] is None)


if __name__ == "__main__":
    cli.command(main)

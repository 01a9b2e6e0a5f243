"""The race: cheats are refused, whoever learns as Version 1 does gets a result, and the files of a room make its board."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace

from common.errors import RunError, UsageError
from common.files import read, read_json, write_json
from common.records.workshop_files import Race
from common.studies import board, race
from common.training import ceilings
from tests import study_options, valid_files
from tests.conftest import ROOT, V1, altered_version, markov
from tests.small_traces import CEILINGS

import numpy as np
import pytest
import safetensors.torch
import torch

RACE, BOARD, SCRIPTS = ROOT / "common/studies/race.py", ROOT / "common/studies/board.py", ROOT / "tests/fixtures/races"
V2 = ROOT / "version2_pytorch_fused/tiny_llama_v2.py"
MINUTES = 0.01


class InThread(threading.Thread):
    """Takes the place of a contestant's process, which needs seconds to start; it ends as its pipe is closed."""

    def __init__(self, target: Callable, args: tuple) -> None:
        super().__init__(target=target, args=(Connection(os.dup(args[0].fileno())), *args[1:]))

    def kill(self) -> None:
        pass


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: SimpleNamespace(Process=InThread))
    monkeypatch.setattr(ceilings, "measure", lambda *_: CEILINGS | {"flops_per_second": 1e15})


@pytest.fixture
def evaluator(threads, config) -> race.Evaluator:
    return race.Evaluator(study_options.resolved(config), markov(50, 0))


@pytest.mark.parametrize(("cheat", "caught"), [
    ("replays_the_answer", "its losses are"),
    ("computes_once_for_many", "(its losses are|the gradient of .* is)"),  # the latter if two batches chance to have one loss
    ("skips_the_optimizer", "(its losses are|the (gradient|update) of .* is)"),
    ("trains_on_held_out_text", "the gradient of .* is"),
])  # fmt: skip
def test_a_cheat_is_refused(evaluator, cheat, caught):
    with pytest.raises(race.Refused, match=rf"^after \d+ steps {caught} not Version 1's: an error of"):
        evaluator.race(SCRIPTS / f"{cheat}.py", MINUTES)


def test_a_fused_version_gets_a_result_and_is_checked_on_the_way(evaluator):
    result = evaluator.race(V2, MINUTES)
    assert result["steps"] >= result["checked_steps"] > 1 and result["ms_per_step"] > 0
    assert 2 < result["held_out_loss"] < 4.5  # nats: a guess among 50 tokens costs 3.9, the source has an entropy of 1.8
    # The update's only bound is the race's: AdamW turns a gradient that is nothing but rounding into a sign.
    assert result["errors"].pop("update") > 0
    assert 0 < max(result["errors"].values()) < 1e-3


def test_a_block_in_the_middle_is_checked_from_the_weights_before_it(evaluator):
    with race.contestant(V1 / "tiny_llama_v1.py", evaluator.options) as ask:
        blocks = [np.stack([torch.stack(evaluator.batches[4 * i + j]).int().numpy() for j in range(4)]) for i in range(3)]
        losses = [np.frombuffer(ask(block))[1:].tolist() for block in blocks]
        state = safetensors.torch.load(ask(None))
    evaluator.check(8, blocks[2], losses[2], state)
    for wrong in (losses[1], [loss + 1 for loss in losses[2]], [float("nan")] * 4):
        with pytest.raises(race.Refused, match="after 8 steps its losses"):
            evaluator.check(8, blocks[2], wrong, state)
    with pytest.raises(race.Refused, match="after 0 steps its losses"):  # of weights that are not Version 1's first ones
        evaluator.check(0, blocks[2][:1], losses[2][:1], state)
    unmoved = state | {name.replace("before", "after"): state[name] for name in state if name.startswith("before weight")}
    with pytest.raises(race.Refused, match="after 8 steps the update of embed_tokens.weight"):
        evaluator.check(8, blocks[2], losses[2], unmoved)


def test_the_text_of_a_race_has_other_names_each_time(evaluator, config):
    again = race.Evaluator(evaluator.options, markov(50, 0))
    assert not (evaluator.held_out[0][0] == again.held_out[0][0]).all()
    assert not (evaluator.batches[0][0] == again.batches[0][0]).all()


def test_a_text_that_is_too_short_says_so_of_its_held_out_parts(threads, config):
    text = markov(50, 0)
    with pytest.raises(UsageError, match=r"\(20 of its 400 parts\) has 20 tokens, too few for a sequence length of 30"):
        race.Evaluator(study_options.resolved(config, "--seq-len", "30"), replace(text, tokens=text.tokens[:400]))


def test_a_curve_may_leave_version_1s_by_little_and_no_step_be_faster_than_the_device(evaluator, monkeypatch):
    """Of three minutes Version 1 gets one. Curves are compared by means of 50 steps, on either side."""
    state, asked = {name.replace("before", "after"): tensor for name, tensor in evaluator.initial.items()}, []

    def result_of(apart: float):
        def drive(script, seconds, judged):
            asked.append(seconds)
            return race.Entry([3.0 + apart * judged] * 100, 2.0 if judged else 3.0, state)

        monkeypatch.setattr(evaluator, "drive", drive)
        return evaluator.race(V2, 3)

    result = result_of(0.04)
    assert asked == pytest.approx([60, 120]) and (result["ms_per_step"], result["baseline_ms_per_step"]) == (2.0, 3.0)
    assert result["errors"]["curve"] == pytest.approx(0.04)
    for apart in (0.06, -0.06):
        with pytest.raises(race.Refused, match="its loss curve is not Version 1's"):
            result_of(apart)
    options = evaluator.options
    rate = race.flops.training_step(options.model, options.batch_size, options.seq_len)["total"] / 2e-3
    monkeypatch.setattr(ceilings, "measure", lambda *_: CEILINGS | {"flops_per_second": 0.75 * rate / race.UNLISTED})
    with pytest.raises(race.Refused, match="its steps stand for"):
        result_of(0.0)


def test_more_than_the_device_can_do_is_refused(evaluator, monkeypatch):
    monkeypatch.setattr(ceilings, "measure", lambda *_: CEILINGS | {"flops_per_second": 1e3})
    with pytest.raises(race.Refused, match=r"its steps stand for .*FLOP/s, and this device reaches"):
        evaluator.race(V1 / "tiny_llama_v1.py", 0)


def test_a_script_that_fails_is_refused_and_one_that_is_no_version_is_bad_input(evaluator, tmp_path):
    with pytest.raises(race.Refused, match="it failed: ValueError: never"):
        evaluator.race(altered_version(tmp_path, "raise ValueError('never')"), 0)
    (tmp_path / "tiny_llama_empty.py").write_text("")
    with pytest.raises(UsageError, match="is not a version: it has no TinyLlama"):
        evaluator.race(tmp_path / "tiny_llama_empty.py", 0)


def test_a_failure_of_version_1_is_not_the_contestants(evaluator, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluator, "baseline", altered_version(tmp_path, "raise ValueError('never')"))
    with pytest.raises(RunError, match="Version 1 does not train here: it failed: ValueError: never") as error:
        evaluator.race(V2, 0)
    assert not isinstance(error.value, race.Refused)


def test_another_model_time_or_text_has_a_section_of_its_own(tmp_path):
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        valid_files.write_race(path)
    assert sum(bool(section.title) for section in board.report(paths).sections) == 1
    rows = [line.split() for line in board.report(paths).terminal().splitlines() if line.startswith("green ")]
    assert rows == [["green", "5", "9", "2", "1.5", "5"]] * 2, "1.5 times as fast as Version 1"
    written = read_json(paths[0])
    model = {"model": written["model"] | {"num_layers": 1}}
    for change in (model, {"minutes": 1.0}, {"data_sha256": "cd" * 32}, {"preset": "small"}):
        write_json(paths[0], written | change)
        assert sum(bool(section.title) for section in board.report(paths).sections) == 2


def test_the_board_has_the_results_in_order_and_says_who_was_refused(threads, execute, refused, config, tmp_path):
    flags = ("--config", config, "--data", "synthetic", "--device", "cpu", "--minutes", 0)
    for name, script, code in (("a", V1 / "tiny_llama_v1.py", 0), ("b", V2, 0), ("c", SCRIPTS / "trains_on_held_out_text.py", 1)):
        execute(RACE, script, "--name", name, *flags, check=code)
    races = {name: read(tmp_path / f"race_{name}.json", Race) for name in "abc"}
    assert races["a"]["refused"] is None and races["c"]["result"] is None
    shown = execute(BOARD, ".").out
    order = sorted("ab", key=lambda name: races[name]["result"]["held_out_loss"])
    lines = [line.split()[0] for line in shown.splitlines() if line[:2] in ("a ", "b ", "c ")]
    assert lines == [*order, "c"] and "refused: after 0 steps the gradient of" in " ".join(shown.split())
    assert "## " in (tmp_path / "board.md").read_text() and "<table" in (tmp_path / "board.html").read_text()
    (tmp_path / "none").mkdir()
    assert "none holds no race_*.json" in refused(BOARD, "none")


@pytest.mark.slow
def test_a_script_that_replaces_the_timer_is_refused_by_the_evaluators_clock(run_script, config, tmp_path):
    """In a process of its own: its clocks would be those of a thread's evaluator too."""
    script = SCRIPTS / "replaces_the_timer.py"
    run_script(RACE, script, "--config", config, "--data", "synthetic", "--device", "cpu", "--minutes", 0.1, check=1)
    assert "it replaced the timer" in read_json(tmp_path / "race_replaces_the_timer.json")["refused"]


def test_a_name_with_a_slash_is_refused(refused):
    assert "--name a/b: it is a part of the file race_NAME.json, so it has no slash" in refused(RACE, V2, "--name", "a/b")

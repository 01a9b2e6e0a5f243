"""--validate-setup: the facts before a run, and the check of its files after it."""

import json

from common import cli, data
from common.errors import RunError, UsageError
from common.training import setup_check
from tests.conftest import TINY, V1

import pytest
import torch

CPU = torch.device("cpu")


@pytest.mark.usefixtures("known_ceilings")
def test_the_facts_and_a_check_that_reads_every_file(execute, tmp_path):
    flags = ("--data", "synthetic", "--num-steps", "4", "--enable-pytorch-profiler", "--validate-setup")
    printed = execute(V1 / "tiny_llama_v1.py", *TINY, *flags).out
    for fact in ("python", "torch", "triton", "deepspeed", "device", "data"):
        assert f"\n  {fact} " in printed, fact
    assert "setup ok: " in printed and "operators" in printed.splitlines()[-1]

    path = tmp_path / "metrics_v1.json"
    measured = json.loads(path.read_text())
    measured["loss"]["all"][0] += 1
    with pytest.raises(RunError, match="does not hold what was measured"):
        setup_check.after(measured, path, [])


HUGE = {
    "vocabulary": (["--vocab-size", "100000000"], "lower --vocab-size (now 100,000,000)"),
    "width": (["--hidden-dim", "1048576"], "lower --hidden-dim (now 1,048,576)"),
    "layers": (["--num-layers", "100000000"], "lower --num-layers (now 100,000,000)"),
    "feed-forward": (["--intermediate-dim", "100000000"], "lower --intermediate-dim (now 100,000,000)"),
    "batch": (["--batch-size", "100000000"], "lower --batch-size (now 100,000,000)"),
    "sequence": (["--seq-len", "100000000"], "lower --seq-len (now 100,000,000)"),
    "steps": (["--num-steps", "1000000000"], "lower --num-steps (now 1,000,000,000)"),
    "preset": (["--preset", "large"], "lower --hidden-dim (now 2,048)"),
    "two at once": (["--num-layers", "1000", "--batch-size", "100000000"], "lower --batch-size (now 100,000,000)"),
}


def options(*flags: str):
    return cli.parse(cli.parser(None).parse_args(flags))


@pytest.fixture
def small_machine(monkeypatch) -> None:
    described = {"kind": "cpu", "name": "A small CPU", "memory_mib": 8 * 1024.0}
    monkeypatch.setattr(setup_check.devices, "describe", lambda _: described)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(("flags", "culprit"), HUGE.values(), ids=HUGE.keys())
def test_what_cannot_fit_names_the_size_that_takes_most(flags, culprit):
    with pytest.raises(UsageError) as error:
        setup_check.memory(options(*flags), CPU)
    assert str(error.value).endswith(f"GiB of memory, and A small CPU has 8.0: {culprit}, which takes most of it")


@pytest.mark.usefixtures("small_machine")
def test_tables_of_a_configuration_that_cannot_fit(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {max_sequence_length: 1000000000}")
    with pytest.raises(UsageError, match="lower max_sequence_length in --config .now 1,000,000,000."):
        setup_check.memory(options("--config", str(tmp_path / "config.yaml")), CPU)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("flags", [(), ("--preset", "medium"), ("--batch-size", "4096", "--use-amp")])
def test_what_may_fit_is_not_refused(flags):
    setup_check.memory(options(*flags), CPU)


def test_nothing_is_read_or_allocated_before(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the data were prepared"))
    assert "lower --num-layers (now 100,000,000)" in refused(V1 / "tiny_llama_v1.py", "--num-layers", "100000000")
    assert not list(tmp_path.iterdir())

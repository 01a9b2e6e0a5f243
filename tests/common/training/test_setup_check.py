"""--validate-setup: the facts before a run, and the check of its files after it."""

import json

from common import cli, data
from common.errors import UsageError
from common.training import setup_check
from tests.conftest import TINY, V1

import pytest
import torch

CPU = torch.device("cpu")


@pytest.mark.usefixtures("known_ceilings")
def test_the_facts_and_a_check_that_reads_every_file(execute):
    flags = ("--data", "synthetic", "--num-steps", "4", "--enable-pytorch-profiler", "--validate-setup")
    printed = execute(V1 / "tiny_llama_v1.py", *TINY, *flags).out
    for fact in ("python", "torch", "triton", "deepspeed", "device", "data"):
        assert f"\n  {fact} " in printed, fact
    assert "setup ok: " in printed and "operators" in printed.splitlines()[-1]


@pytest.mark.parametrize("same", [True, False], ids=["the same flags", "other flags"])
def test_a_run_at_the_same_time_has_overwritten_the_record(execute, monkeypatch, tmp_path, same):
    """A run with the same flags has the same losses, but times of its own."""

    def another(record, path, profiles):
        measured = json.loads(path.read_text())
        (measured["step_ms"] if same else measured["loss"])["all"][0] += 1
        path.write_text(json.dumps(measured))
        after(record, path, profiles)

    after = setup_check.after
    monkeypatch.setattr(setup_check, "after", another)
    said = execute(V1 / "tiny_llama_v1.py", *TINY, "--data", "synthetic", "--num-steps", "2", "--validate-setup", check=1).err
    assert "error: metrics_v1.json is now another run's" in said and "--metrics-out" in said


@pytest.mark.parametrize("owners, said", [
    (["triton"], "3.7.1"),
    (["pytorch-triton"], "3.7.1 (package pytorch-triton)"),
    (
        ["pytorch-triton-rocm", "triton"],
        "pytorch-triton-rocm, triton; two packages own it, reinstall only the one of your torch",
    ),
    ([], "no package's"),
])  # fmt: skip
def test_triton_is_named_with_its_version_and_its_package(monkeypatch, owners, said):
    monkeypatch.setattr(setup_check.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(setup_check.importlib.metadata, "packages_distributions", lambda: {"triton": owners * 2})
    monkeypatch.setattr(setup_check.importlib.metadata, "version", lambda _: "3.7.1")
    assert setup_check._triton() == said


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
    described = {"kind": "cpu", "name": "A small CPU", "memory_mib": 3.5 * 1024}
    monkeypatch.setattr(setup_check.devices, "describe", lambda _: described)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(("flags", "culprit"), HUGE.values(), ids=HUGE.keys())
def test_what_cannot_fit_names_the_size_that_takes_most(flags, culprit):
    with pytest.raises(UsageError) as error:
        setup_check.memory(options(*flags), CPU)
    assert str(error.value).endswith(f"GiB of memory, and A small CPU has 3.5: {culprit}, which takes most of it")


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

"""--validate-setup: the facts before a run, and the check of its files after it. The last line
may name the next command.
"""

import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

from common.precision import Precision
from common.training import ending
from tests.conftest import TINY, V1

import pytest
import torch


@pytest.mark.usefixtures("known_ceilings")
def test_the_facts_and_a_check_that_reads_every_file(execute):
    flags = (
        "--data",
        "synthetic",
        "--num-steps",
        "4",
        "--enable-pytorch-profiler",
        "--validate-setup",
    )
    printed = execute(V1 / "tiny_llama_v1.py", *TINY, *flags).out
    for fact in ("python", "torch", "triton", "deepspeed", "device", "data"):
        assert f"\n  {fact} " in printed, fact
    assert "setup ok: " in printed and "operators" in printed.splitlines()[-1]


@pytest.mark.usefixtures("known_ceilings")
def test_the_last_line_is_the_same_run_profiled(execute):
    script = V1 / "tiny_llama_v1.py"
    flags = (*TINY, "--data", "synthetic", "--num-steps", "4")
    last = execute(script, *flags).out.splitlines()[-1]
    assert last.startswith("next: python ")
    assert shlex.split(last)[2:] == [str(script), *flags, "--enable-pytorch-profiler"]


def test_the_loss_on_unseen_text_is_the_mean_of_its_batches_and_of_all_processes(as_rank):
    """Of four, each with two sequences in each of three batches."""
    as_rank(0, 4)
    model = SimpleNamespace(loss=lambda loss, _: torch.tensor(loss))
    precision = Precision(torch.device("cpu"), None)
    options = SimpleNamespace(eval_steps=3, batch_size=2)
    found = ending.evaluate(model, [(1.0, 0), (2.0, 0), (6.0, 0)], precision, options)
    assert found == {"loss": 3, "perplexity": pytest.approx(math.exp(3)), "sequences": 24}


def test_a_saved_model_is_not_trained_again_and_a_profile_leads_to_another(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(ending, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "version1_a/tiny_llama_v1.py"
    first = tmp_path / "version1_a/p/profile_1.json"
    second = tmp_path / "version2_b/p/profile_2.json"
    for path in (script, first):
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])

    def printed(profiles, save_model=None) -> str:
        options = SimpleNamespace(checkpoint_dir=None, save_model=save_model, profile_dir=Path("p"))
        ending.print_next_command(options, profiles)
        return capsys.readouterr().out

    assert printed([], save_model=Path("model")) == ""
    assert printed([first]) == ""
    second.parent.mkdir(parents=True)
    second.touch()
    pages = "version1_a/p/profile_1.json version2_b/p/profile_2.json"
    assert printed([second]) == f"next: python page.py {pages}\n"

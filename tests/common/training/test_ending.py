"""--validate-setup: the facts before a run, and the check of its files after it."""

from tests.conftest import TINY, V1

import pytest


@pytest.mark.usefixtures("known_ceilings")
def test_the_facts_and_a_check_that_reads_every_file(execute):
    flags = ("--data", "synthetic", "--num-steps", "4", "--enable-pytorch-profiler", "--validate-setup")
    printed = execute(V1 / "tiny_llama_v1.py", *TINY, *flags).out
    for fact in ("python", "torch", "triton", "deepspeed", "device", "data"):
        assert f"\n  {fact} " in printed, fact
    assert "setup ok: " in printed and "operators" in printed.splitlines()[-1]

"""--validate-setup: the facts before a run, and the check of its files after it. The last line
names the next command.
"""

import os
import shlex

from tests.conftest import ROOT, TINY, V1

import pytest


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
    assert "setup ok: " in printed and "operators" in printed.splitlines()[-2]


@pytest.mark.usefixtures("known_ceilings")
def test_the_last_line_is_the_next_command(execute, tmp_path):
    """A run, the same profiled, Version 2 (which no test runs here), and the last version, after
    which only the page is left.
    """
    script, flags = (
        V1 / "tiny_llama_v1.py",
        (*TINY, "--data", "synthetic", "--num-steps", "4", "--profile-dir", "of this test"),
    )

    def following(script, *flags) -> list[str]:
        beginning, line = execute(script, *flags).out.rstrip().splitlines()[-1].split(" ", 1)
        assert beginning == "next:"
        return shlex.split(line)[1:]

    assert following(script, *flags[:-2]) == [str(script), *flags[:-2], "--enable-pytorch-profiler"]
    v2 = os.path.relpath(ROOT / "version2_pytorch_fused/tiny_llama_v2.py")
    assert following(script, *flags, "--use-amp") == [v2, "--preset", "tiny", "--use-amp"]
    pages = following(ROOT / "version4_ultra_fused/tiny_llama_v4.py", *flags)
    assert (
        pages[0] == os.path.relpath(ROOT / "page.py")
        and execute(*pages).out == "written: run.html\n"
    )

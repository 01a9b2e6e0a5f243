"""The block sizes of attention's forward kernel, compiled for GPUs that are not here."""

from tests.conftest import PATHS, ROOT

import pytest

pytest.importorskip("triton", reason="needs Triton")

SCRIPT = ROOT / "version3_triton/exercises/tune_blocks.py"
ONE_SIZE = ("--head-dim", "128", "--block-m", "64", "--block-n", "64", "--warps", "4")
VARIABLES = {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "-1", "TRITON_INTERPRET": "1"}


def printed_rows(run_script, *flags: str) -> list[list[str]]:
    """The cells of the rows under the header, where no cell holds two spaces."""
    lines = run_script(SCRIPT, *ONE_SIZE, *flags, **VARIABLES).stdout.splitlines()
    header = next(place for place, line in enumerate(lines) if line.startswith("BLOCK_M"))
    return [[cell for cell in line.split("  ") if cell] for line in lines[header + 1 :]]


@pytest.mark.parametrize(
    "target, stages, shared_kib, programs, limit",
    [("sm_90", 3, 112, 2, "shared memory"), ("gfx942", 3, 72, 0, "shared memory")],
)
def test_stages_fill_shared_memory(run_script, target, stages, shared_kib, programs, limit):
    """On sm_90 it holds q and three blocks of keys and of values, 16 KiB each."""
    [row] = printed_rows(run_script, "--target", target, "--stages", str(stages))
    cells = [cell.strip() for cell in row]
    assert cells[:4] == ["64", "64", "4", str(stages)]
    assert cells[5:9] == ["0", str(shared_kib), str(programs), limit]
    assert (cells[-1] == "*") == (target == "sm_90")


def test_a_size_that_is_no_power_of_two_is_refused(run_script):
    done = run_script(SCRIPT, "--block-n", "48", check=2, **VARIABLES)
    assert "--block-n: invalid choice: 48" in done.stderr and done.stderr.count("\n") == 1

"""The exercise on DeepSpeed: its stages train as one process does, and wrong input is one line. Two processes on the CPU."""

import importlib.util
import json
import re

from common import config
from common.analysis.formulas import flops
from tests.conftest import ROOT

import pytest

V2 = ROOT / "version2_pytorch_fused"
FOLDER = V2 / "exercises/deepspeed"
SCRIPT, FILES = FOLDER / "train.py", {stage: FOLDER / f"ds_config_zero{stage}.json" for stage in (1, 2, 3)}
QUICK = ("--seq-len", "16", "--num-steps", "4", "--data", "synthetic")
LOSS, HELD = re.compile(r"^step .* loss +([\d.]+)$", re.MULTILINE), re.compile(r"holds ([\d.]+) MiB .* and ([\d.]+) MiB")
MIB = flops.parameters(config.resolve("tiny").model)["total"] * 4 / 2**20  # of the weights
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage, flags, batch_size", [(1, (), 8), (2, ("--batch-size", "1"), 2), (3, (), 8)])
def test_a_stage_trains_as_one_process_and_holds_its_part(execute, run_script, tmp_path, stage, flags, batch_size):
    """With 4 sequences a process, as its file says, or with as many as the flag says."""
    execute(V2 / "tiny_llama_v2.py", "--batch-size", batch_size, *QUICK)
    expected = json.loads((tmp_path / "metrics_v2.json").read_text())["loss"]["all"]
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run_script("-m", *launch, SCRIPT, "--deepspeed", FILES[stage], *flags, *QUICK)
    assert [float(loss) for loss in LOSS.findall(done.stdout)] == pytest.approx(expected, abs=2e-4)
    weights, moments = map(float, HELD.search(done.stdout).groups())
    assert weights == pytest.approx(MIB / 2 if stage == 3 else MIB, abs=0.01) and moments == pytest.approx(MIB, abs=0.01)


@pytest.mark.parametrize("stage", FILES)
def test_a_file_names_its_stage_and_leaves_the_gradients_as_they_are(stage):
    """DeepSpeed clips them unless it is told otherwise."""
    settings = json.loads(FILES[stage].read_text())
    assert settings["zero_optimization"] == {"stage": stage} and settings["gradient_clipping"] == 0


def test_without_deepspeed_it_ends_in_one_line(execute, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        execute(SCRIPT, "--deepspeed", FILES[1], check=2).err
        == "error: deepspeed is not installed here, and this script needs it\n"
    )


@pytest.fixture
def launched(monkeypatch) -> None:
    """As the one process of a launcher."""
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)


@needs_deepspeed
def test_without_a_launcher_it_is_refused(refused):
    assert "start it with deepspeed or torchrun" in refused(SCRIPT, "--deepspeed", FILES[1])


@needs_deepspeed
@pytest.mark.parametrize("content, said", [
    (None, "settings.json"),
    ("[1]", "settings.json: the file: "),
    ("{}", "settings.json: zero_optimization: "),
    ('{"zero_optimization": {"stage": 0}}', "settings.json: zero_optimization.stage: "),
])  # fmt: skip
def test_a_file_that_is_missing_or_has_no_stage_is_refused(refused, launched, tmp_path, content, said):
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    assert said in refused(SCRIPT, "--deepspeed", tmp_path / "settings.json")

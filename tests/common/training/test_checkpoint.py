"""A saved model opens in transformers, and a run goes on from a checkpoint as if it had never
stopped.
"""

import json
import os
import shutil
import signal
from pathlib import Path

from common import data
from common.config import ModelConfig
from common.training import checkpoint
from tests.conftest import ROOT, TINY, V1, run_options
from tests.oracle import assert_close
from tracepage.errors import RunError
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch


def test_checkpoint_opens_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = (
        "def area(r):\n    return 3.14 * r ** 2  # don't , ever . Gr\u00f6\u00dfe \u2211 \u6f22\n"
    )
    (tmp_path / "text.py").write_text(text * 200, encoding="utf-8")
    dataset = data.load(str(tmp_path / "text.py"), 300, seed=0)
    config = ModelConfig(
        vocab_size=300,
        hidden_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        max_sequence_length=64,
        rope_theta=5000.0,
        rms_norm_eps=1e-4,
    )
    model, folder = tiny_llama_v1.TinyLlama(config), tmp_path / "saved"
    folder.mkdir()
    checkpoint.save(folder, model.baseline_state_dict(), config, dataset)

    opened, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report  # nothing missing, unexpected or of another shape
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    input_ids = tokenizer(text, return_tensors="pt").input_ids
    assert input_ids.flatten().tolist() == dataset.tokens[: input_ids.shape[1]].tolist()
    assert tokenizer.decode(input_ids[0]) == text
    assert_close(opened(input_ids).logits, model(input_ids))


# ---------------------------------------------------------------------------------------------------------- to go on from

SCRIPT = V1 / "tiny_llama_v1.py"
QUICK = (*TINY, "--data", "synthetic", "--device", "cpu")
V2 = ROOT / "version2_pytorch_fused/tiny_llama_v2.py"
V4 = ROOT / "version4_ultra_fused/tiny_llama_v4.py"
AGAIN = ("--checkpoint-dir", "saved", "--resume")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def trained(execute, tmp_path):
    """trained(steps, *flags, script=SCRIPT): the losses of a run up to this step."""

    def train(steps: int, *flags: object, script: Path = SCRIPT) -> list[float]:
        execute(script, *QUICK, "--num-steps", steps, "--metrics-out", "metrics.json", *flags)
        return json.loads((tmp_path / "metrics.json").read_text())["loss"]["all"]

    return train


CASES = {
    "fp32": (SCRIPT, []),
    "float16": (SCRIPT, ["--use-amp", "--amp-dtype", "float16"]),
    "v2 float16": (V2, ["--use-amp", "--amp-dtype", "float16"]),
    "v4": (V4, ["--lr-schedule", "cosine", "--lr-decay-steps", "9"]),
    "v4 bfloat16": (V4, ["--use-amp"]),
    "v4 moments in bfloat16": (V4, ["--enable-bf16-moments"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_with_the_same_bits(trained, no_kernels, tmp_path, case):
    """The losses depend on weights, moments, data and, in float16, on the loss scale. Version 4 has
    buffers of its own.
    """
    script, flags = CASES[case]
    whole = trained(9, *flags, script=script)
    first = trained(6, *flags, "--checkpoint-dir", "saved", "--checkpoint-every", 2, script=script)
    assert names(tmp_path / "saved") == ["step-00000004", "step-00000006"], "the newest two"
    files = names(tmp_path / "saved/step-00000006")
    assert files == ["position.json", "shard-00001-model-00001-of-00001.safetensors"], (
        "neither can hold code"
    )
    rest = trained(9, *flags, *AGAIN, script=script)
    assert first + rest == whole and len(set(whole)) == 9
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert (record["training"]["first_step"], len(record["step_ms"]["all"])) == (7, 3)


def test_a_checkpoint_of_plain_adamw_goes_on_with_fused_adamw(trained):
    trained(3, "--disable-fused-adamw", "--checkpoint-dir", "saved", script=V2)
    rest = trained(6, *AGAIN, script=V2)
    assert rest == pytest.approx(trained(6, script=V2)[3:], abs=1e-5)


def test_everything_that_a_step_may_depend_on_is_restored(monkeypatch, tmp_path):
    """The loss scale and the optimizer's counters, at the memory where they were."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def make_step(model, optimizer, precision):
        step = tiny_llama_v1.make_step(model, optimizer, precision)

        def watched(batch):
            loss = step(batch)
            state = [
                value
                for parameter in model.parameters()
                for value in optimizer.state[parameter].values()
            ]
            seen.append(
                (torch.tensor(precision.scaler.get_scale()), *(value.clone() for value in state))
            )
            return loss

        return watched

    def train(steps: int, *flags: str) -> list:
        own = ["--use-amp", "--amp-dtype", "float16", "--num-steps", str(steps), *flags]
        tiny_llama_v1.train(run_options(tiny_llama_v1, *QUICK, *own), make_step=make_step)
        return seen[-1]

    whole = train(5)
    train(3, "--checkpoint-dir", "saved")
    assert all(map(torch.equal, whole, train(5, *AGAIN)))


def test_a_run_that_is_stopped_saves_where_it_stopped(at_step, trained, monkeypatch, tmp_path):
    at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.chdir(tmp_path)
    flags = [*QUICK, "--num-steps", "9", "--checkpoint-dir", "saved"]
    first = tiny_llama_v1.train(run_options(tiny_llama_v1, *flags)).record["loss"]["all"]
    assert len(first) == 4 and names(tmp_path / "saved") == ["step-00000004"]
    assert first + trained(9, *AGAIN) == trained(9)


KILLED = """
import os, pathlib
from version1_pytorch_baseline import tiny_llama_v1

rename = pathlib.Path.rename

def killed_at_the_second(self, target):
    if target.name == "step-00000004":
        os.kill(os.getpid(), 9)
    return rename(self, target)

pathlib.Path.rename = killed_at_the_second
tiny_llama_v1.main()
"""


def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(
    trained, run_script, tmp_path
):
    flags = [*QUICK, "--num-steps", "9", "--checkpoint-dir", "saved", "--checkpoint-every", "2"]
    (tmp_path / "killed.py").write_text(KILLED)
    run_script("killed.py", *flags, check=-signal.SIGKILL)
    assert names(tmp_path / "saved") == [checkpoint.BUILDING, "step-00000002"]
    assert trained(9, *AGAIN) == trained(9)[2:]
    assert names(tmp_path / "saved") == ["step-00000002", "step-00000009"]


def test_a_run_that_a_checkpoint_does_not_fit_is_refused(trained, refused):
    """Also where it is of another form, and where there is one that nobody wants to go on from."""
    trained(3, "--checkpoint-dir", "saved")
    again = (*QUICK, *AGAIN, "--num-steps", 4)
    assert "saved/step-00000003 is there: go on from it with --resume" in refused(
        SCRIPT, *QUICK, "--checkpoint-dir", "saved"
    )
    assert "leaves nothing to train: raise --num-steps (now 3)" in refused(
        SCRIPT, *again, "--num-steps", 3
    )
    said = refused(
        SCRIPT,
        *again,
        "--batch-size",
        3,
        "--seed",
        1,
        "--hidden-dim",
        64,
        "--use-amp",
        "--lr-schedule",
        "cosine",
    )
    assert (
        "another hidden_size (32, now 64), sequences in a step of all processes (2, now 3), seed (0, now 1)"
        in said
    )
    assert (
        "schedule (constant, now cosine to step 4), data sha256 (" in said
        and "precision (fp32, now bf16)" in said
    )
    position = Path("saved/step-00000003/position.json")
    position.write_text(position.read_text().replace("checkpoint/2", "checkpoint/1"))
    assert (
        "is not a file of schema tiny-llama-checkpoint/2 (found: tiny-llama-checkpoint/1)"
        in refused(SCRIPT, *again)
    )


def test_moments_of_another_format_are_refused(trained, refused, no_kernels, monkeypatch):
    """They were float32 where a checkpoint does not name their format, as older ones do not."""
    inputs = checkpoint.inputs

    def older(*given: object) -> dict:
        return {key: value for key, value in inputs(*given).items() if key != checkpoint.MOMENTS}

    with monkeypatch.context() as before:
        before.setattr(checkpoint, "inputs", older)
        trained(3, "--checkpoint-dir", "saved", script=V4)
    again = (*QUICK, *AGAIN, "--num-steps", 4)
    said = refused(V4, *again, "--enable-bf16-moments")
    assert "is of a run with another format of moments (fp32, now bf16); give the same" in said
    assert len(trained(4, *AGAIN, script=V4)) == 1


def test_a_checkpoint_that_is_cut_off_is_one_line(trained, execute, tmp_path):
    trained(3, "--checkpoint-dir", "saved")
    [tensors] = (tmp_path / "saved/step-00000003").glob("*.safetensors")
    os.truncate(tensors, 1000)
    said = execute(SCRIPT, *QUICK, *AGAIN, "--num-steps", 4, check=1).err
    assert said.startswith("error: cannot read saved/step-00000003: ") and said.count("\n") == 1


def zeros(folder: Path, name: str = "shard*") -> None:
    """Some in the middle of a file, as a power cut leaves them."""
    [path] = folder.glob(name)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


def cut(folder: Path) -> None:
    [path] = folder.glob("shard*")
    os.truncate(path, path.stat().st_size - 8)


def edit_position(folder: Path, before: str, after: str) -> None:
    path = folder / checkpoint.POSITION
    path.write_text(path.read_text().replace(before, after, 1))


DAMAGES = {
    "cut": cut,
    "zeros": zeros,
    "no tensors": lambda folder: [*folder.glob("shard*")][0].unlink(),
    "no position": lambda folder: (folder / checkpoint.POSITION).unlink(),
    "cut position": lambda folder: os.truncate(folder / checkpoint.POSITION, 60),
    "scaler of text": lambda folder: edit_position(folder, '"scale": 65536.0', '"scale": "x"'),
    "another scaler": lambda folder: edit_position(folder, '"scale": 65536.0', '"scale": 6553.0'),
}


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory) -> Path:
    """The folder of a float16 run, with checkpoints at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("twice")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flags = [*QUICK, "--use-amp", "--amp-dtype", "float16", "--num-steps", "4"]
        flags += ["--checkpoint-dir", "saved", "--checkpoint-every", "2"]
        tiny_llama_v1.train(run_options(tiny_llama_v1, *flags))
    return folder / "saved"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_not_whole(saved_twice, tmp_path, damage):
    copied = shutil.copytree(saved_twice / "step-00000004", tmp_path / "copied")
    assert checkpoint.check(copied) is None
    damage(copied)
    assert str(copied) in str(checkpoint.check(copied))


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(trained, execute, tmp_path):
    """The damaged one stays until a new one takes its place, and is not one of the two newest."""
    whole = trained(8)
    trained(6, "--checkpoint-dir", "saved", "--checkpoint-every", 2)
    zeros(tmp_path / "saved/step-00000006")
    again = (*QUICK, *AGAIN, "--checkpoint-every", 1, "--metrics-out", "metrics.json")
    said = execute(SCRIPT, *again, "--num-steps", 5).out
    assert "left out, as it is damaged: cannot read saved/step-00000006: its content is not" in said
    assert "going on from saved/step-00000004\n" in said
    assert names(tmp_path / "saved") == [f"step-0000000{step}" for step in (4, 5, 6)]
    assert trained(8, *AGAIN, "--checkpoint-every", 1) == whole[5:]
    assert names(tmp_path / "saved") == ["step-00000007", "step-00000008"]


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(monkeypatch, capsys, tmp_path):
    real = shutil.rmtree

    def busy(path, **options) -> None:
        if "step-00000001" in str(path):
            raise OSError(16, "Device or resource busy", str(path))
        real(path, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", busy)
    flags = [*QUICK, "--num-steps", "5", "--checkpoint-dir", "saved", "--checkpoint-every", "1"]
    assert tiny_llama_v1.train(run_options(tiny_llama_v1, *flags)).exit_code == 0
    note = "note: saved/step-00000001 cannot be removed: Device or resource busy\n"
    assert capsys.readouterr().out.count(note) == 1
    assert names(tmp_path / "saved") == [f"step-0000000{step}" for step in (1, 4, 5)]


def test_profiled_steps_are_the_last_ones_and_have_no_checkpoint_between_them(trained, tmp_path):
    """Steps 6 to 8, for which the profiler warms up in 4 and 5; then steps 12 to 14 of a run that
    goes on.
    """
    trained(8, "--checkpoint-dir", "saved", "--checkpoint-every", 1, "--enable-pytorch-profiler")
    assert names(tmp_path / "saved") == ["step-00000003", "step-00000008"]
    trained(14, *AGAIN, "--enable-pytorch-profiler")
    steps = json.loads((tmp_path / "metrics.json").read_text())["step_ms"]
    assert (len(steps["all"]), steps["profiled"]) == (6, 3)


def test_a_folder_that_is_gone_when_the_run_saves_is_one_line(at_step, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    at_step(2, lambda: shutil.rmtree(tmp_path / "saved"))
    flags = [*QUICK, "--num-steps", "3", "--checkpoint-dir", "saved"]
    with pytest.raises(RunError, match="cannot write saved/step-00000003: "):
        tiny_llama_v1.train(run_options(tiny_llama_v1, *flags))

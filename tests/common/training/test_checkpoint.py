"""A saved model opens in transformers, and a run goes on from a checkpoint as if it had never stopped."""

import errno
import fcntl
import io
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from common import data
from common.config import ModelConfig
from common.errors import RunError, UsageError
from common.training import checkpoint
from tests.conftest import ROOT, TINY, V1, run_options
from tests.oracle import assert_close
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch


def test_checkpoint_opens_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "def area(r):\n    return 3.14 * r ** 2  # don't , ever . Gr\u00f6\u00dfe \u2211 \u6f22\n"
    (tmp_path / "text.py").write_text(text * 200, encoding="utf-8")
    dataset = data.load(str(tmp_path / "text.py"), 300, seed=0)
    config = ModelConfig(
        vocab_size=300, hidden_size=48, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        max_sequence_length=64, rope_theta=5000.0, rms_norm_eps=1e-4,
    )  # fmt: skip
    model, folder = tiny_llama_v1.TinyLlama(config), tmp_path / "saved"
    folder.mkdir()
    checkpoint.save(folder, model.baseline_state_dict(), config, dataset)

    opened, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, unexpected or of another shape
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    input_ids = tokenizer(text, return_tensors="pt").input_ids
    assert input_ids.flatten().tolist() == dataset.tokens[: input_ids.shape[1]].tolist()
    assert tokenizer.decode(input_ids[0]) == text
    assert_close(opened(input_ids).logits, model(input_ids))


# ---------------------------------------------------------------------------------------------------------- to go on from

SCRIPT = V1 / "tiny_llama_v1.py"
QUICK = (*TINY, "--data", "synthetic", "--device", "cpu")
V4 = ROOT / "version4_ultra_fused/tiny_llama_v4.py"


def names(folder: Path) -> list[str]:
    """The files and folders that a run leaves, beside the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.fixture
def trained(execute, tmp_path):
    """trained(steps, *flags, script=SCRIPT): the losses of a run up to this step."""

    def train(steps: int, *flags: object, script: Path = SCRIPT) -> list[float]:
        execute(script, *QUICK, "--num-steps", steps, "--metrics-out", "metrics.json", *flags)
        return json.loads((tmp_path / "metrics.json").read_text())["loss"]["all"]

    return train


CASES = {
    "fp32": (SCRIPT, []), "float16": (SCRIPT, ["--use-amp", "--amp-dtype", "float16"]),
    "v4": (V4, []), "v4 bfloat16": (V4, ["--use-amp"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_with_the_same_bits(trained, no_kernels, tmp_path, case):
    """The losses depend on weights, moments, data and, in float16, on the loss scale. Version 4 has buffers of its own."""
    script, flags = CASES[case]
    whole = trained(9, *flags, script=script)
    first = trained(6, *flags, "--checkpoint-dir", "saved", "--checkpoint-every", 2, script=script)
    assert names(tmp_path / "saved") == ["step-00000004", "step-00000006"], "the newest two"
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path / "saved/step-00000006", check=True
    )
    rest = trained(9, *flags, "--checkpoint-dir", "saved", "--resume", script=script)
    assert first + rest == whole and len(set(whole)) == 9
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert (record["training"]["first_step"], len(record["step_ms"]["all"])) == (7, 3)


def test_everything_that_a_step_may_depend_on_is_restored(monkeypatch, tmp_path):
    """Random numbers, the loss scale and the optimizer's counters, at the memory where they were."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def make_step(model, optimizer, precision):
        step = tiny_llama_v1.make_step(model, optimizer, precision)

        def watched(batch):
            loss = step(batch)
            state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
            seen.append((torch.rand(1), precision.scaler.get_scale(), *(value.clone() for value in state)))
            return loss

        return watched

    def train(steps: int, *flags: str) -> list:
        seen.clear()
        own = ["--use-amp", "--amp-dtype", "float16", "--num-steps", str(steps), *flags]
        tiny_llama_v1.train(run_options(tiny_llama_v1, *QUICK, *own), make_step=make_step)
        return list(seen)[-1]

    whole = train(5)
    train(3, "--checkpoint-dir", "saved")
    assert all(
        map(torch.equal, map(torch.as_tensor, whole), map(torch.as_tensor, train(5, "--checkpoint-dir", "saved", "--resume")))
    )


def test_a_run_that_is_stopped_saves_where_it_stopped(at_step, trained, monkeypatch, tmp_path):
    at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.chdir(tmp_path)
    flags = [*QUICK, "--num-steps", "9", "--checkpoint-dir", "saved"]
    first = tiny_llama_v1.train(run_options(tiny_llama_v1, *flags)).record["loss"]["all"]
    assert len(first) == 4 and names(tmp_path / "saved") == ["step-00000004"]
    assert first + trained(9, "--checkpoint-dir", "saved", "--resume") == trained(9)


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


def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(trained, run_script, tmp_path):
    flags = [*QUICK, "--num-steps", "9", "--checkpoint-dir", "saved", "--checkpoint-every", "2"]
    run_script("-c", KILLED, *flags, check=-signal.SIGKILL)
    left_over, whole = names(tmp_path / "saved")
    assert left_over.startswith(".step-00000004.") and whole == "step-00000002"
    rest = trained(9, "--checkpoint-dir", "saved", "--resume")
    assert rest == trained(9)[2:]
    assert names(tmp_path / "saved") == ["step-00000002", "step-00000009"]


def test_flags_that_a_checkpoint_does_not_fit_are_refused(trained, refused):
    trained(3, "--checkpoint-dir", "saved")
    assert "saved/step-00000003 is there: go on from it with --resume" in refused(SCRIPT, *QUICK, "--checkpoint-dir", "saved")
    again = ("--checkpoint-dir", "saved", "--resume")
    assert "leaves nothing to train: raise --num-steps (now 3)" in refused(SCRIPT, *QUICK, "--num-steps", 3, *again)
    said = refused(SCRIPT, *QUICK, *again, "--batch-size", 3, "--seed", 1, "--seq-len", 8)
    assert "another sequences in a step of all processes (2, now 3), sequence length (16, now 8), seed (0, now 1)" in said
    assert ", data sha256 (" in said
    assert "of a run with another TF32 (False, now True)" in refused(SCRIPT, *QUICK, *again, "--num-steps", 4, "--allow-tf32")


def test_a_schedule_is_the_same_before_and_after(trained, refused):
    """Also where only one of the two runs has one, and where the checkpoint is too old to say."""
    cosine = ("--lr-schedule", "cosine", "--lr-decay-steps", 8)
    trained(3, "--checkpoint-dir", "cosine", *cosine)
    trained(3, "--checkpoint-dir", "constant")
    again = (*QUICK, "--num-steps", 4, "--resume", "--checkpoint-dir")
    assert "schedule (cosine to step 8, now constant)" in refused(SCRIPT, *again, "cosine")
    assert "schedule (constant, now cosine to step 8)" in refused(SCRIPT, *again, "constant", *cosine)


def test_a_checkpoint_that_does_not_name_schedule_and_format_was_constant_and_without_fp8(trained, tmp_path):
    whole = trained(4)
    trained(3, "--checkpoint-dir", "saved")
    path = tmp_path / "saved/step-00000003/position.json"
    position = json.loads(path.read_text())
    assert position["inputs"].pop("learning rate schedule") == "constant" and position["inputs"].pop("products in FP8") is False
    del position["inputs"]["TF32"]
    path.write_text(json.dumps(position))
    with_checksums(path.parent)
    assert trained(4, "--checkpoint-dir", "saved", "--resume") == whole[3:]


def test_no_checkpoint_is_written_inside_the_profiled_steps(trained, tmp_path):
    """Steps 6 to 8, for which the profiler warms up in 4 and 5."""
    trained(8, "--checkpoint-dir", "saved", "--checkpoint-every", 1, "--enable-pytorch-profiler")
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == ["step-00000003", "step-00000008"]


def test_a_saved_model_has_no_tokenizer_of_the_run_before(execute, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text("{}")
    execute(SCRIPT, *QUICK, "--num-steps", 1, "--save-model", "model")
    config, weights = sorted((tmp_path / "model").iterdir())
    assert (config.name, weights.name) == ("config.json", "model.safetensors") and config.stat().st_mode == weights.stat().st_mode


def test_a_folder_that_is_gone_when_the_run_saves_is_one_line(at_step, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    at_step(2, lambda: shutil.rmtree(tmp_path / "saved"))
    flags = [*QUICK, "--num-steps", "3", "--checkpoint-dir", "saved"]
    with pytest.raises(RunError, match="cannot write saved/step-00000003: "):
        tiny_llama_v1.train(run_options(tiny_llama_v1, *flags))


def test_a_run_on_a_gpu_goes_on_from_a_checkpoint_of_a_cpu(trained, monkeypatch, tmp_path):
    """Such a checkpoint has no random numbers of a GPU."""
    whole = trained(3)
    trained(2, "--checkpoint-dir", "saved")
    tensors = checkpoint._tensors
    monkeypatch.setattr(
        checkpoint, "_tensors", lambda *given: tensors(*given) | {"random.gpu.0": torch.zeros(16, dtype=torch.uint8)}
    )
    monkeypatch.chdir(tmp_path)
    flags = [*QUICK, "--num-steps", "3", "--checkpoint-dir", "saved", "--resume"]
    again = tiny_llama_v1.train(run_options(tiny_llama_v1, *flags))
    assert again.record["loss"]["all"] == whole[2:]


def test_only_folders_that_their_record_names_are_removed(trained, tmp_path):
    saved = tmp_path / "saved"
    trained(2, "--checkpoint-dir", "saved")
    for copy in ("step-00000002.good", "step-00000001", ".step-00000002.mine"):
        shutil.copytree(saved / "step-00000002", saved / copy)
    for folder in (".step-mine", "step-", ".step-00000001.0123456789abcdef"):
        (saved / folder).mkdir()
    for file in ("step-00000000", ".step-00000001", "step-1"):
        (saved / file).write_text("notes")
    theirs = {path.name for path in saved.iterdir()} - {"step-00000002"}
    trained(8, "--checkpoint-dir", "saved", "--checkpoint-every", 2, "--resume")
    assert {path.name for path in saved.iterdir()} == theirs | {"step-00000006", "step-00000008"}


def test_a_second_run_with_the_same_folder_is_refused(at_step, trained, monkeypatch, tmp_path):
    """The lock ends with the run, or with its process: see the one that is killed."""
    flags = [*QUICK, "--num-steps", "3", "--checkpoint-dir", "saved"]

    def second() -> None:
        with pytest.raises(
            UsageError, match="^--checkpoint-dir: another run uses saved: wait for its end, or name another folder$"
        ):
            tiny_llama_v1.train(run_options(tiny_llama_v1, *flags, "--resume"))

    at_step(2, second)
    monkeypatch.chdir(tmp_path)
    tiny_llama_v1.train(run_options(tiny_llama_v1, *flags))
    assert len(trained(4, "--checkpoint-dir", "saved", "--resume")) == 1


def test_a_file_system_without_locks_is_named(execute, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = execute(SCRIPT, *QUICK, "--num-steps", 2, "--checkpoint-dir", "saved").out
    assert "saved cannot be locked (Function not implemented): start no other run with it\n" in said


# ------------------------------------------------------------------------------------------------------------ damaged ones


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def zero(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(4096))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGED = "{name} is not as SHA256SUMS has it"
DAMAGES = {
    "zeros": ("__0_0.distcp", zero, CHANGED),
    "cut off": ("__0_0.distcp", lambda path: os.truncate(path, 5), CHANGED),
    "a bit": ("__0_0.distcp", lambda path: flip(path, 3_000_000), CHANGED),
    "a bit of the record": ("position.json", lambda path: flip(path, 2000), CHANGED),
    "another record": ("position.json", lambda path: path.write_text("{}"), CHANGED),
    "empty metadata": (".metadata", lambda path: path.write_bytes(b""), CHANGED),
    "a pipe": ("__0_0.distcp", pipe, "{name} is missing, or not a regular file"),
    "a pipe as record": ("position.json", pipe, "{name} is missing, or not a regular file"),
    "missing": (".metadata", Path.unlink, "{name} is missing, or not a regular file"),
    "checksums cut off": ("SHA256SUMS", lambda path: os.truncate(path, 100), "{name} is damaged"),
    "checksums missing": ("SHA256SUMS", Path.unlink, "it has no {name}, as those of version 1.0"),
    "a pipe for checksums": ("SHA256SUMS", pipe, "it has no {name}, as those of version 1.0"),
}  # fmt: skip


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(trained, execute, tmp_path):
    saved, flags = tmp_path / "saved", ("--checkpoint-dir", "saved", "--resume")
    losses = trained(4, "--checkpoint-dir", "saved", "--checkpoint-every", 2)
    shutil.copytree(saved, tmp_path / "whole")
    for case, (name, damage, reason) in DAMAGES.items():
        shutil.rmtree(saved)
        shutil.copytree(tmp_path / "whole", saved)
        damage(saved / "step-00000004" / name)
        said = execute(SCRIPT, *QUICK, "--num-steps", 4, "--metrics-out", "metrics.json", *flags).out
        reason = reason.format(name=name)
        assert f"going on from saved/step-00000002, as step-00000004 is damaged ({reason})\n" in said, case
        assert json.loads((tmp_path / "metrics.json").read_text())["loss"]["all"] == losses[2:], case
        first, second, aside = names(saved)
        assert (first, second) == ("step-00000002", "step-00000004") and f"it is saved/{aside} now" in said, case
    damage(saved / "step-00000002" / name)
    damage(saved / "step-00000004" / name)
    said = execute(SCRIPT, *QUICK, "--num-steps", 6, *flags, check=1).err
    assert said.startswith("error: no checkpoint in saved is whole: step-00000004 is damaged (it has no SHA256SUMS")
    assert "; step-00000002 is damaged (" in said and said.count("\n") == 1


def with_checksums(folder: Path) -> Path:
    """A checkpoint whose checksums fit what it holds now: they are no signature."""
    held = sorted({path.name for path in folder.iterdir()} - {"SHA256SUMS"})
    (folder / "SHA256SUMS").write_text("".join(f"{checkpoint._checksum(folder / name)}  {name}\n" for name in held))
    return folder


def test_a_flipped_bit_of_the_metadata_is_one_line(trained, tmp_path):
    """Its checksum shows it; and where the checksum was made from what is damaged, the file is read or refused."""
    trained(2, "--checkpoint-dir", "saved")
    folder, chance = tmp_path / "saved/step-00000002", random.Random(0)
    whole, refused = (folder / ".metadata").read_bytes(), 0
    for _ in range(100):
        flip(folder / ".metadata", chance.randrange(8 * len(whole)))
        assert checkpoint._damage(folder) == ".metadata is not as SHA256SUMS has it"
        (folder / "SHA256SUMS").rename(folder / "kept")
        with_checksums(folder)
        try:
            checkpoint._metadata(folder)
        except RunError as error:
            refused += str(error).startswith(f"cannot read {folder}/.metadata: ")
        (folder / "kept").rename(folder / "SHA256SUMS")
        (folder / ".metadata").write_bytes(whole)
    assert refused > 10


class Calls:
    """Becomes a call of this function when it is unpickled."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def described_as_bytes(folder: Path) -> object:
    """PyTorch unpickles what is described so."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name, place = next((key, value) for key, value in metadata.storage_data.items() if key.fqn == "weight.norm.weight")
    torch.save(Calls(os.mkdir, "ran"), crafted := io.BytesIO())
    with (folder / "__0_0.distcp").open("ab") as file:
        place.offset, place.length = file.tell(), file.write(crafted.getvalue())
    metadata.storage_data[type(name)(name.fqn)] = place
    metadata.state_dict_metadata[name.fqn] = BytesStorageMetadata()
    return metadata


def beside_the_folder(folder: Path) -> object:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../pipe"
    return metadata


CRAFTED = {
    "a call": (lambda _: Calls(os.mkdir, "ran"), "it names posix.mkdir, which no checkpoint needs"),
    "an attribute": (lambda _: Calls(getattr, Calls(__import__, "os"), "mkdir"), "it names builtins.__import__, which"),
    "bytes": (described_as_bytes, "metadata.BytesStorageMetadata, which no checkpoint needs"),
    "a path": (beside_the_folder, "it names ../pipe, which SHA256SUMS does not have"),
    "no metadata": (lambda _: {"storage_data": 1}, "AttributeError: 'dict' object has no attribute 'storage_data'"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_checkpoint_that_was_made_up_runs_no_code(trained, execute, tmp_path, case):
    trained(2, "--checkpoint-dir", "saved")
    os.mkfifo(tmp_path / "saved/pipe")
    folder, (craft, message) = tmp_path / "saved/step-00000002", CRAFTED[case]
    (folder / ".metadata").write_bytes(pickle.dumps(craft(folder)))
    with_checksums(folder)
    said = execute(SCRIPT, *QUICK, "--num-steps", 3, "--checkpoint-dir", "saved", "--resume", check=1).err
    assert not (tmp_path / "ran").exists()
    assert said.startswith("error: cannot read saved/step-00000002/.metadata: ") and message in said and said.count("\n") == 1


def test_a_member_of_an_enumeration_as_python_3_11_2_pickles_it_is_read(tmp_path):
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as encoding

    pickled = pickle.dumps(Calls(getattr, encoding, "TORCH_CHANNELS_LAST"))
    assert checkpoint._Unpickler(io.BytesIO(pickled)).load() is encoding.TORCH_CHANNELS_LAST


def test_the_last_steps_of_a_run_that_goes_on_are_profiled(trained, tmp_path):
    trained(3, "--checkpoint-dir", "saved")
    trained(9, "--checkpoint-dir", "saved", "--resume", "--enable-pytorch-profiler")
    steps = json.loads((tmp_path / "metrics.json").read_text())["step_ms"]
    assert (len(steps["all"]), steps["profiled"]) == (6, 3) and list((tmp_path / "pytorch_profiles").glob("profile_*.json"))

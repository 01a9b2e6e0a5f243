"""Decoding with a cache gives what the model gives without one; and what generate.py refuses,
prints and records.
"""

import functools
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from common import cli, data
from common.options import Options
from common.rope import rope_tables
from common.training import checkpoint
from tests.conftest import ROOT, runs_kernels
from tests.oracle import DEVICE
from tracepage import files
from tracepage.errors import UsageError
from tracepage.records.study_files import Decoding

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers.implementations import ByteLevelBPETokenizer

pytest.importorskip("triton")
from decoding import decode_kernels, decode_products, generate
from version1_pytorch_baseline import tiny_llama_v1

SCRIPT = ROOT / "decoding/generate.py"
SIZES = (
    "model: {vocab_size: 300, hidden_size: 32, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,\n"
    "  intermediate_size: 48, max_sequence_length: 24}\ntraining: {sequence_length: 24}\n"
)
PROMPTS = torch.tensor([[3, 1, 41, 5, 9], [2, 6, 53, 5, 8], [9, 7, 93, 2, 3]])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SIZES)
    return tmp_path / "small.yaml"


def decoder(
    operations: str, dtype: torch.dtype, config: Path, batch: int = 1, length: int = 24
) -> generate.Decoder:
    flags = ["--prompt-tokens", "1", "--config", str(config)]
    options = cli.resolve(Options, cli.parse(generate.parser(), flags))
    return generate.Decoder(operations, options, batch, length, dtype)


def logits_of(made: generate.Decoder, prompts: torch.Tensor, steps: int) -> torch.Tensor:
    """The logits from which each token was chosen, [B, steps + 1, V]."""
    rows, write = [], made.write
    made.write = lambda row: write(rows.append(row) or row)
    made.prefill(prompts.to(DEVICE))
    for _ in range(steps):
        made.step()
    return torch.stack(rows, 1)


def check_against_a_whole_pass(made: generate.Decoder, prompts: torch.Tensor, steps: int) -> None:
    """Against Version 1's whole forward pass over the texts that were written."""
    length = prompts.shape[1]
    got, texts = logits_of(made, prompts, steps), made.ids[:, : length + 1 + steps]
    dtype = got.dtype
    whole = tiny_llama_v1.TinyLlama(generate.ModelConfig(**made.config.model_dump())).to(
        DEVICE, dtype
    )
    whole.load_state_dict(made.model.baseline_state_dict())
    expected = whole(texts[:, :-1])[:, length - 1 :]
    torch.testing.assert_close(
        got, expected, **({} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4})
    )
    assert torch.equal(texts[:, :length], prompts.to(DEVICE))
    assert torch.equal(texts[:, length:], expected.argmax(dim=-1))
    assert (made.positions == length + steps).all()


@runs_kernels
@pytest.mark.parametrize(
    "operations, dtype",
    [
        ("v1", torch.float64),
        ("v2", torch.float64),
        ("v3", torch.float64),
        ("v3", torch.float32),
    ],
)
def test_a_cache_changes_neither_logits_nor_tokens(operations, dtype, config):
    made = decoder(operations, dtype, config, len(PROMPTS))
    check_against_a_whole_pass(made, PROMPTS, 18)


@runs_kernels
@pytest.mark.parametrize(
    "heads, kv_heads, dim, prompt, batch",
    [
        (2, 2, 16, 5, 1),
        (4, 2, 16, 254, 2),  # The prompt ends in a chunk of keys, the text in the next.
        (8, 1, 32, 130, 1),
        (20, 1, 16, 5, 1),
    ],
)
def test_the_fused_step_is_that_of_the_model(heads, kv_heads, dim, prompt, batch, tmp_path):
    """For any number of texts, of query heads of a key head, and of chunks of keys."""
    sizes = {
        "vocab_size": 300,
        "hidden_size": heads * dim,
        "num_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 48,
        "max_sequence_length": 300,
    }
    (tmp_path / "fused.yaml").write_text(yaml.safe_dump({"model": sizes}))
    torch.manual_seed(0)
    made = decoder("fused", torch.float32, tmp_path / "fused.yaml", batch, prompt + 10)
    check_against_a_whole_pass(made, torch.randint(300, (batch, prompt)), 3)


@runs_kernels
@pytest.mark.parametrize(
    "batch, dtype",
    [(1, torch.float32), (2, torch.float32), (2, torch.float16), (17, torch.float16)],
)
def test_the_columns_past_the_last_whole_block_count(batch, dtype, monkeypatch):
    """Products whose blocks of columns do not fill the last."""
    monkeypatch.setattr(decode_products, "TILES", dict.fromkeys(decode_products.TILES, (4, 256, 2)))
    norm, next_norm = (tiny_llama_v1.RMSNorm(size, 1e-5).to(DEVICE, dtype) for size in (600, 22))
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(next_norm.weight)
    sizes = ((batch, 600), (22, 600), (batch, 22))
    x, weight, y = (torch.randn(size, device=DEVICE).to(dtype) for size in sizes)
    weight /= 600**0.5
    first, second = (norm(x) @ weight.T).chunk(2, dim=1)
    error = 1e-4 if dtype == torch.float32 else 2e-2
    close = functools.partial(torch.testing.assert_close, rtol=error, atol=error)
    together = batch > 1 and dtype != torch.float32
    stream = decode_products.Stream(x, None, None)
    if together:
        squares = x.float().square().unflatten(1, (3, 200)).sum(2)
        stream = decode_products.Stream(x, x * norm.weight, squares)
    with torch.no_grad():
        close(decode_products.product("qkv", stream, weight, norm), norm(x) @ weight.T)
        gated = torch.nn.functional.silu(first) * second
        close(decode_products.product("gate_up", stream, weight, norm), gated)
        added = decode_products.add("down", x, weight, stream._replace(x=y.clone()), next_norm)
        close(added.x, y + x @ weight.T)
        if together:
            close(added.scaled, added.x * next_norm.weight)
            close(added.squares.sum(1), added.x.float().square().sum(1))


@runs_kernels
@pytest.mark.parametrize(
    "tile, size, columns", [("qkv", 512, 512), ("qkv", 256, 0), ("head", 512, 0)]
)
def test_as_many_columns_as_a_tile_names_are_fetched_ahead_if_a_row_has_them(
    tile, size, columns, monkeypatch
):
    launched = []

    def launch(*arguments, **options) -> None:
        launched.append(options["AHEAD"])

    kernel = defaultdict(lambda: launch)  # by the grid
    monkeypatch.setattr(decode_products, "_batch_product", kernel)
    x, weight = (torch.zeros(shape, device=DEVICE).half() for shape in ((2, size), (16, size)))
    stream = decode_products.Stream(x, x, torch.zeros(2, 1, device=DEVICE))
    decode_products.product(tile, stream, weight, tiny_llama_v1.RMSNorm(size, 1e-5))
    assert launched == [columns]


@runs_kernels
@pytest.mark.parametrize("size", [40, 600], ids=["part of a block", "more than a block"])
def test_each_text_goes_on_from_the_row_of_its_newest_token(size):
    ids = torch.tensor([[3, 1, 4], [1, 5, 2]], device=DEVICE)
    positions = torch.tensor([1, 2], device=DEVICE)
    table = torch.randn(6, size, device=DEVICE).half()
    norm = tiny_llama_v1.RMSNorm(size, 1e-5).to(DEVICE).half()
    torch.nn.init.normal_(norm.weight)
    rows = table[[1, 2]]
    with torch.no_grad():
        x, scaled, squares = decode_kernels.embed(ids, positions, table, norm)
        torch.testing.assert_close(scaled, rows * norm.weight)
    assert torch.equal(x, rows)
    torch.testing.assert_close(squares.sum(1), rows.float().square().sum(1))


@runs_kernels
def test_texts_at_different_positions_attend_as_if_each_were_alone():
    qkv = torch.randn(2, 8 * 16, device=DEVICE)
    caches = [torch.randn(2, 2, 24, 16, device=DEVICE) for _ in range(2)]
    positions = torch.tensor([3, 17], device=DEVICE)
    tables = tuple(table.to(DEVICE) for table in rope_tables(16, 24, 1e4))
    for text in range(2):
        alone = [x[text : text + 1].clone() for x in (qkv, *caches, positions)]
        together = [x.clone() for x in (qkv, *caches, positions)]
        expected = decode_kernels.attend(*alone, tables)
        assert torch.equal(decode_kernels.attend(*together, tables)[text], expected[0])
        for whole, one in zip(together, alone, strict=True):
            assert torch.equal(whole[text], one[0])


@runs_kernels
def test_heads_that_the_fused_step_does_not_take_are_refused(config):
    with pytest.raises(
        UsageError, match="a head has 8 numbers, which is no power of two from 16 to"
    ):
        decoder("fused", torch.float32, config)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("operations", [*generate.VERSIONS, "fused"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_captured_step_writes_the_eager_text(batch, operations, temperature, tmp_path):
    (tmp_path / "wide.yaml").write_text(SIZES.replace("hidden_size: 32", "hidden_size: 64"))
    texts = []
    for capture in (False, True):
        torch.manual_seed(0)
        made = decoder(operations, torch.bfloat16, tmp_path / "wide.yaml", batch)
        made.temperature = temperature
        generate.measure(made, PROMPTS[:batch].to(DEVICE), 19, capture, seed=0)
        texts.append(made.ids)
    assert torch.equal(*texts) and torch.equal(texts[0][:, :5].cpu(), PROMPTS[:batch])


def test_a_temperature_draws_as_the_model_says(config):
    made, logits = (
        decoder("v1", torch.float32, config),
        torch.tensor([[0.0, 1.0, 2.0]], device=DEVICE),
    )
    assert made.drawn(logits).argmax() == 2
    made.temperature = 0.5
    drawn = torch.stack([made.drawn(logits).argmax() for _ in range(4000)])
    share = drawn.bincount(minlength=3) / 4000
    torch.testing.assert_close(share, (logits[0] / 0.5).softmax(0), rtol=0, atol=0.03)


def test_a_checkpoint_writes_text_and_a_record(execute, config, tmp_path):
    """All operations write the same text from it, twice at once."""
    (tmp_path / "text").write_text("def twice(x):\n    return 2 * x\n" * 50)
    train = (
        "--config",
        config,
        "--batch-size",
        "2",
        "--seq-len",
        "24",
        "--num-steps",
        "30",
        "--data",
        "text",
    )
    execute(
        ROOT / "version2_pytorch_fused/tiny_llama_v2.py",
        *train,
        "--warmup-steps",
        "1",
        "--save-model",
        "model",
    )
    texts = set()
    for name in generate.VERSIONS:
        write = (
            "--checkpoint",
            "model",
            "--prompt",
            "def tw",
            "--tokens",
            "6",
            "--batch-size",
            "2",
            "--metrics-out",
            "out.json",
        )
        texts.add(execute(SCRIPT, *write, "--operations", name).out.partition("\n\nprefill")[0])
    [both] = texts
    text = both[: len(both) // 2 - 1]
    assert both == f"{text}\n\n{text}"
    assert text.startswith("def tw") and len(text) > 8
    measured = files.read(tmp_path / "out.json", Decoding)
    assert (measured["operations"], measured["mode"], measured["tokens"]) == ("v3", "eager", 6)
    assert measured["token_ms"]["count"] == 5
    weights = sum(
        weight.numel()
        for weight in tiny_llama_v1.TinyLlama(
            generate.ModelConfig(**measured["model"])
        ).parameters()
    )
    assert measured["weight_bytes"] == 4 * weights
    layers, kv_heads, head_dim, length = 2, 2, 8, measured["prompt_tokens"] + 3
    assert measured["cache_bytes"] == 2 * 2 * layers * kv_heads * head_dim * length * 4


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--tokens", "20"],
            "a prompt of 5, --tokens 20: give at least 1 and 4, at most 24 in all",
        ),
        (["--tokens", "3"], "--tokens 3: give"),
        (["--capture-step", "--device", "cpu"], "--capture-step needs a GPU"),
    ],
)
def test_what_cannot_be_is_refused(refused, config, flags, message):
    assert message in refused(
        SCRIPT, "--prompt-tokens", "5", "--config", config, "--tokens", "4", *flags
    )


def test_a_folder_without_a_model_is_refused(refused, tmp_path):
    assert "cannot read empty/config.json" in refused(SCRIPT, "--checkpoint", "empty")
    (tmp_path / "config.json").write_text("{}")
    assert ". holds no model that --save-model has written" in refused(SCRIPT, "--checkpoint", ".")


# ------------------------------------------------------------------------------------------- other checkpoints


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "text").write_text("def twice(x):\n    return 2 * x\n" * 50)
        dataset = data.load(str(folder / "text"), 300, seed=0)
    sizes = yaml.safe_load(SIZES)["model"]
    model = tiny_llama_v1.TinyLlama(generate.ModelConfig(**sizes))
    (folder / "model").mkdir()
    checkpoint.save(
        folder / "model", model.baseline_state_dict(), generate.ModelConfig(**sizes), dataset
    )
    return folder / "model"


@pytest.fixture
def model(saved_model, tmp_path) -> Path:
    """A copy that a test may change; it is written from with `--checkpoint model`."""
    return shutil.copytree(saved_model, tmp_path / "model")


def changed_config(folder: Path, **changes: object) -> None:
    content = files.read_json(folder / "config.json") | changes
    content = {key: value for key, value in content.items() if value != "left out"}
    files.write_json(folder / "config.json", content)


def opened(folder: Path) -> None:
    """As the script does it."""
    config, state = generate.saved(folder)
    generate.tokenized(folder, "def ", config.vocab_size)
    generate.load_weights(tiny_llama_v1.TinyLlama(config), state, folder)


WRITE = ("--checkpoint", "model", "--tokens", "4", "--device", "cpu")
OTHER_MODELS = {
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "sliding_window": 8,
    "hidden_act": "gelu",
    "model_type": "qwen3",
    "quantization_config": {"bits": 4},
    "num_attention_heads": "four",
    "rms_norm_eps": 0,
    "num_hidden_layers": True,
}


@pytest.mark.parametrize("key, value", OTHER_MODELS.items(), ids=OTHER_MODELS)
def test_a_key_of_a_config_that_this_model_does_not_have_is_refused(model, key, value):
    changed_config(model, **{key: value})
    named = {"num_hidden_layers": "num_layers"}.get(key, key)
    with pytest.raises(UsageError, match=rf"no model that --save-model has written \({named} = "):
        opened(model)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "rms_norm_eps", "vocab_size"])
def test_a_key_that_is_missing_is_named(model, key):
    changed_config(model, **{key: "left out"})
    with pytest.raises(UsageError, match=rf"\(it has no {key}\)"):
        opened(model)


def test_what_transformers_adds_to_a_config_changes_nothing(execute, model):
    text = execute(SCRIPT, *WRITE).out.partition("\n\nprefill")[0]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    more = {"pretraining_tp": 1, "use_cache": True, "rope_scaling": None, "eos_token_id": 2}
    changed_config(model, rope_theta="left out", rope_parameters=rope, **more)
    assert execute(SCRIPT, *WRITE).out.partition("\n\nprefill")[0] == text
    changed_config(model, rope_parameters=rope | {"rope_theta": 10.0})
    assert generate.saved(model)[0].rope_theta == 10


def changed_tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


NORM, HEAD = "model.norm.weight", "lm_head.weight"
DAMAGES = {
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "it holds no keys"),
    "other sizes": (
        lambda folder: changed_config(folder, intermediate_size=64),
        "layers.0.mlp.down_proj.weight is [32, 48], not [32, 64])",
    ),
    "an untied head": (
        changed_tensors(lambda tensors: tensors.update({HEAD: torch.ones(300, 32)})),
        "lm_head.weight is not that of the embedding",
    ),
    "a missing tensor": (
        changed_tensors(lambda tensors: tensors.pop(NORM)),
        "norm.weight is absent",
    ),
    "an extra tensor": (
        changed_tensors(lambda tensors: tensors.update(bias=torch.ones(8))),
        "bias is [8], not absent",
    ),
    "another name": (
        changed_tensors(lambda tensors: tensors.update({"model.end": tensors.pop(NORM)})),
        "end is [32], not absent",
    ),
    "another shape": (
        changed_tensors(lambda tensors: tensors.update({NORM: torch.ones(4, 8)})),
        "norm.weight is [4, 8], not [32]",
    ),
    "whole numbers": (
        changed_tensors(lambda tensors: tensors.update({NORM: tensors[NORM].long()})),
        "norm.weight is torch.int64, not [32]",
    ),
    "cut tensors": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        "holds no model that --save-model has written",
    ),
    "a cut tokenizer": (
        lambda folder: os.truncate(folder / "tokenizer.json", 200),
        "model/tokenizer.json is no tokenizer: ",
    ),
    "another tokenizer": (
        lambda folder: ByteLevelBPETokenizer({f"t{i}": i for i in range(400)}, []).save(
            str(folder / "tokenizer.json")
        ),
        "is another model's: it has a token 399, and the model 300 tokens",
    ),
    "another schema": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": 3}'),
        "is no tokenizer: ",
    ),
}


@pytest.mark.parametrize("damage, message", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_checkpoint_is_refused(model, damage, message):
    opened(model)
    damage(model)
    with pytest.raises(UsageError) as refusal:
        opened(model)
    assert message in str(refusal.value)


def test_what_cannot_be_written_from_is_one_line(refused, model):
    assert r"--prompt: 'caf\udce9' is not UTF-8" in refused(SCRIPT, *WRITE, "--prompt", "caf\udce9")
    changed_config(model, rope_scaling={"factor": 2.0})
    assert "(rope_scaling = {'factor': 2.0}: this model has no such part)" in refused(
        SCRIPT, *WRITE
    )
    assert "a prompt of 10000000000, --tokens 4: give" in refused(
        SCRIPT, "--prompt-tokens", 10**10, "--tokens", 4
    )

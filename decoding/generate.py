"""Writes text with a trained model, one token a step, and measures the step against its bytes.

The layers of a version run as they are, with a KV cache in place of their attention: the *prefill*
reads the prompt in one pass, and then each *decode* step reads all weights and the cache for one
token. Saved weights have Version 1's names, so those of any version write with any version's
operations. Without a checkpoint weights are random, and only times mean anything.

    python generate.py --checkpoint ../version1_pytorch_baseline/model --prompt "def "
    python generate.py --preset large --prompt-tokens 512 --operations fused --capture-step
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

import argparse
import functools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import exercise_tools as exercises
from common import cli, saved_config, weights
from common import device as devices
from common.config import ModelConfig
from common.options import Options
from common.precision import Precision
from common.timing import benchmark, summarize
from common.training import capture, ceilings, record
from studies import version_files
from tracepage import files
from tracepage.cost import flops
from tracepage.errors import UsageError, first_line
from tracepage.records.study_files import Decoding

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
SCRIPTS = sorted(HERE.parent.glob("version[1-3]_*/tiny_llama_v*.py"))
VERSIONS = {path.stem[-2:]: path for path in SCRIPTS}


class Decoder:
    """A version's model with a KV cache: its layers run with `attend` as their attention."""

    def __init__(
        self, operations: str, options: Options, batch: int, length: int, dtype: torch.dtype
    ) -> None:
        """`batch`: texts, all as long; `length`: of the prompt and of all that follows."""
        version: Any = version_files.load(VERSIONS["v3" if operations == "fused" else operations])
        self.cache = exercises.load(HERE, "kv_cache", unset="solution")
        settings = version_files.switched(version, options)
        make_model = functools.partial(version.make_model, settings)
        # The attention is replaced before the model is made: its layers keep the function.
        if hasattr(version, "kernels"):
            table = version.kernels.choose(settings.switches, options.device)
            if dtype == torch.float64:
                table = version.kernels.REFERENCE
            self.whole = table.attention
            make_model.keywords["operations"] = table._replace(attention=self.attend)
        else:
            self.whole = version.attention
            version.attention = self.attend
        self.config = options.model
        self.device = devices.select(options.device)
        self.temperature = 0.0
        with self.device, weights.drawn_on(self.device):
            self.model = make_model().to(self.device)
        self.tables = self.model.cos, self.model.sin  # [S_max, Dh], which stay float32
        self.model.to(dtype)
        layers = self.config.num_layers
        shape = (2, layers, batch, self.config.num_key_value_heads, length, self.config.head_dim)
        cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.keys, self.values = cache  # [L, B, K, T, Dh] each
        # Prompt and text, [B, T].
        self.ids = torch.zeros(batch, length, dtype=torch.long, device=self.device)
        # The position is that of the newest token, which the cache lacks: the same in all texts.
        self.positions = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.position = self.positions[:1]
        self.one: Callable[[], Tensor] = self.logits_of_newest
        self.write: Callable[[Tensor], None] = self.write_largest
        if operations == "fused":
            from decoding import decode_kernels

            self.one, self.write = decode_kernels.fused(self)

    @torch.no_grad()
    def logits(self, ids: Tensor, places: Tensor) -> Tensor:  # [B, S], [S] -> [B, V]
        """The logits of the token after the last."""
        self.places = places
        self.layers = zip(self.keys, self.values, strict=True)
        self.model.cos, self.model.sin = (table[places] for table in self.tables)  # [S, Dh]
        return self.model.lm_head(self.model.hidden_states(ids)[:, -1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, S, Dh], 2 x [B, K, S, Dh] -> [B, H, S, Dh]."""
        keys, values = next(self.layers)  # [B, K, T, Dh]
        self.cache.append(keys, values, k, v, self.places)
        if q.shape[2] > 1:  # a prompt: nothing stands before it
            return self.whole(q, k, v)
        return self.cache.attend(q, keys, values, self.places)

    def drawn(self, logits: Tensor) -> Tensor:  # [B, V] -> [B, V]
        """Logits whose largest is the token: the likeliest, or with a temperature a draw from
        softmax(logits / temperature).
        """
        if not self.temperature:
            return logits
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        # Noise of Gumbel's distribution makes the largest a draw from that softmax.
        return logits.float() / self.temperature - noise

    def logits_of_newest(self) -> Tensor:  # [B, V]
        """The logits of a decode step."""
        return self.logits(self.ids[:, self.position], self.position)

    def write_largest(self, logits: Tensor) -> None:  # [B, V]
        """Writes a token behind the newest of each text."""
        self.positions += 1
        self.ids.index_copy_(1, self.position, logits.argmax(1, keepdim=True))

    def prefill(self, prompts: Tensor) -> None:
        """Reads the prompts, [B, S], in one pass, and writes the first token of each text."""
        length = prompts.shape[1]
        self.ids[:, :length] = prompts
        logits = self.logits(prompts, torch.arange(length, device=self.device))
        self.positions.fill_(length - 1)
        self.write(self.drawn(logits))

    def step(self) -> None:
        """Writes a token more of each text. No shape changes and the host reads nothing: a graph
        can do it.
        """
        self.write(self.drawn(self.one()))


def saved(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """What --save-model has written: sizes, and weights under Version 1's names.

    UsageError: --save-model has not written this folder, or not this model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = saved_config.read(files.read_json(folder / "config.json"))
        tensors = load_file(folder / "model.safetensors")
    except (UsageError, SafetensorError, OSError) as error:
        raise not_saved(folder, error) from error
    state = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    embedding = state.get("embed_tokens.weight", torch.empty(0))
    if not torch.equal(state.setdefault("lm_head.weight", embedding), embedding):
        raise not_saved(
            folder, "lm_head.weight is not that of the embedding, to which ours is tied"
        )
    return config, state


def not_saved(folder: Path, reason: object) -> UsageError:
    return UsageError(
        f"--checkpoint: {folder} holds no model that --save-model has written ({reason})"
    )


def load_weights(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    """UsageError: the tensors have other names, shapes or numbers than the model's."""
    ours = described(model.baseline_state_dict())
    theirs = described(state)
    for name in sorted(ours.keys() | theirs.keys()):
        if theirs.get(name) != ours.get(name):
            difference = f"{theirs.get(name, 'absent')}, not {ours.get(name, 'absent')}"
            raise not_saved(folder, f"{name} is {difference}")
    model.load_state_dict(state)


def described(state: dict[str, Tensor]) -> dict[str, object]:
    """The shape of each tensor of floating-point numbers, and the dtype of another."""
    return {
        name: list(tensor.shape) if tensor.is_floating_point() else tensor.dtype
        for name, tensor in state.items()
    }


def tokenized(folder: Path, prompt: str, vocab_size: int) -> tuple[Any, list[int]]:
    """The tokenizer, which only a model of text has, and the prompt's tokens. UsageError: it is
    damaged, or another model's.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    text = files.read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
        ids = tokenizer.encode(prompt).ids
    except Exception as error:  # The library has no class of its own.
        raise UsageError(f"--checkpoint: {path} is no tokenizer: {first_line(error)}") from error
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise UsageError(
            f"--checkpoint: {path} is another model's: it has a token {largest:,}, "
            f"and the model {vocab_size:,} tokens"
        )
    return tokenizer, ids


def measure(
    decoder: Decoder, prompts: Tensor, tokens: int, captured: bool, seed: int
) -> tuple[list[float], list[float]]:
    """The ms of prefills, and of each decode step that writes the texts in `decoder.ids`."""
    step = decoder.step
    prefill: Callable[[], None] = functools.partial(decoder.prefill, prompts)
    if captured:
        step = devices.capture_graph(step)
        prefill = devices.capture_graph(prefill)
    else:
        step()
    prefills = benchmark(prefill, decoder.device, warmup=1, iterations=5)
    torch.manual_seed(seed)
    prefill()
    return prefills, benchmark(step, decoder.device, warmup=0, iterations=tokens - 1)


def make_record(
    arguments: Namespace, decoder: Decoder, prompt: int, times: tuple[list[float], ...]
) -> Decoding:
    """Times, and by formula the bytes and FLOPs of the prefill and of a mean decode step."""
    config = decoder.config
    dtype = decoder.keys.dtype
    prefill_ms, token_ms = map(summarize, times)
    length = prompt + arguments.tokens // 2  # the mean
    batch = arguments.batch_size
    weight_bytes, cache_bytes = decoder.cache.token_bytes(config, length, dtype.itemsize)
    step_bytes = weight_bytes + batch * cache_bytes
    rate = 1e3 * step_bytes / token_ms["median"]
    one = flops.forward(config, 1, 1)
    whole = flops.forward(config, 1, prompt)
    step_flops = batch * (one["total"] + (length - 1) * one["attention"])
    # The head reads the last position alone.
    prefill_flops = batch * (whole["total"] - whole["head"] + one["head"])
    prompt_bytes = decoder.cache.token_bytes(config, prompt, dtype.itemsize)
    prefill_bytes = prompt_bytes[0] + batch * prompt_bytes[1]
    precision = Precision(decoder.device, None if dtype == torch.float32 else dtype)
    peak = ceilings.measure(decoder.device, precision) if arguments.measure_peak else None
    schema = files.schema_of(Decoding)
    measured = record.header(schema, decoder.device, precision.name, model=config)
    measured |= {
        "preset": arguments.preset,
        "operations": arguments.operations,
        "mode": "captured" if arguments.capture_step else "eager",
        "batch_size": batch,
        "prompt_tokens": prompt,
        "tokens": arguments.tokens,
        "prefill_ms": prefill_ms,
        "token_ms": token_ms,
        "weight_bytes": weight_bytes,
        "cache_bytes": batch * cache_bytes,
        "bytes_per_second": rate,
        "copy_percent": peak and 100 * rate / peak["bytes_per_second"],
        "ceilings": peak,
        "token_intensity": step_flops / step_bytes,
        "prefill_flops": prefill_flops,
        "prefill_intensity": prefill_flops / prefill_bytes,
    }
    return cast(Decoding, measured)


def print_record(measured: Decoding) -> None:
    prefill = measured["prefill_ms"]["median"]
    ms = measured["token_ms"]
    weight_mb = measured["weight_bytes"] / 1e6
    cache_mb = measured["cache_bytes"] / 1e6
    copy = measured["copy_percent"]
    share = f", {copy:.1f}% of a measured copy" if copy else ""
    batch = measured.get("batch_size", 1)
    print(f"prefill   {prefill:.3g} ms for {batch * measured['prompt_tokens']:,} tokens")
    print(f"decode    {ms['median']:.4g} ms a step (p20 {ms['p20']:.4g}, p80 {ms['p80']:.4g})")
    print(f"tokens/s  {batch * 1e3 / ms['median']:,.4g}")
    print(f"MB/step   {weight_mb:,.4g} of weights, {cache_mb:,.3g} of cache")
    print(f"GB/s      {measured['bytes_per_second'] / 1e9:,.4g}{share}")


def text(argument: str) -> str:
    """An argument that is UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{argument!r} is not UTF-8") from error
    return argument


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a folder that --save-model has written"
    )
    source.add_argument(
        "--prompt-tokens", type=cli.positive, metavar="N", help="random weights and N random tokens"
    )
    cli.add(result, "--preset", "--config", "--seed", "--device", "--capture-step")
    add = result.add_argument
    add("--prompt", type=text, default="def ", metavar="TEXT", help="its start (default: 'def ')")
    add("--batch-size", type=cli.positive, default=1, metavar="B", help="texts (default: 1)")
    add("--tokens", type=cli.positive, default=64, metavar="N", help="at least 4 (default: 64)")
    add("--temperature", type=cli.amount, default=0.0, help="0: the likeliest token, 1: a draw")
    add("--operations", choices=(*VERSIONS, "fused"), default="v2", help="fused: decode_kernels.py")
    add("--measure-peak", action="store_true", help="time a large copy, for the %% of its rate")
    add("--metrics-out", type=Path, metavar="FILE", help="file for the record")
    return result


@exercises.unsolved()
def main() -> None:
    arguments = cli.parse(parser())
    options = cli.resolve(Options, arguments)
    output = arguments.metrics_out
    if output:
        files.writable_file(output, "--metrics-out", (arguments.checkpoint, arguments.config))
    device = devices.select(arguments.device)
    tokenizer = None
    count = arguments.prompt_tokens
    if arguments.checkpoint:
        config, state = saved(arguments.checkpoint)
        options = replace(options, model=config)
        tokenizer, ids = tokenized(arguments.checkpoint, arguments.prompt, config.vocab_size)
        count = len(ids)
    length = count + arguments.tokens
    longest = options.model.max_sequence_length
    # A capture first writes three tokens.
    if not count or arguments.tokens < 4 or length > longest:
        raise UsageError(
            f"a prompt of {count}, --tokens {arguments.tokens}: "
            f"give at least 1 and 4, at most {longest} in all"
        )
    if arguments.capture_step:
        capture.check_supported(device)
    half = devices.is_gpu(device) and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if half else torch.float32
    torch.manual_seed(options.seed)
    prompts = torch.randint(options.model.vocab_size, (arguments.batch_size, count))
    decoder = Decoder(arguments.operations, options, arguments.batch_size, length, dtype)
    if tokenizer:
        load_weights(decoder.model, state, arguments.checkpoint)
        prompts[:] = torch.tensor(ids)
    decoder.temperature = arguments.temperature
    times = measure(
        decoder, prompts.to(device), arguments.tokens, arguments.capture_step, options.seed
    )
    if tokenizer:
        for written in decoder.ids.tolist():
            print(tokenizer.decode(written), end="\n\n")
    measured = make_record(arguments, decoder, count, times)
    print_record(measured)
    if output:
        files.write_measurement(output, measured, "--metrics-out")


if __name__ == "__main__":
    cli.command(main)

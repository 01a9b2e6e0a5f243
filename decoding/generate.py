"""Writes text with a trained model, one token a step, and measures the step against the bytes that it must read.

The layers of a version run as they are, with a KV cache in place of their attention: the *prefill* reads the prompt in one pass,
and then each *decode* step reads all weights and the cache for one token. Version 1's names hold for the weights of all versions,
so any of them writes with any version's operations. Without a checkpoint weights are random, and only times mean anything.

    python tiny_llama_v1.py --save-model model
    python generate.py --checkpoint model --prompt "def "
    python generate.py --preset large --prompt-tokens 512 --operations v3 --capture-step --measure-peak
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import argparse
import importlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

from common import cli, files, weights
from common import device as devices
from common.analysis.formulas import flops
from common.config import ModelConfig
from common.errors import UsageError
from common.options import Options
from common.precision import SHORT, Precision
from common.records.study_files import Decoding
from common.timing import Clock, benchmark, summarize
from common.training import capture, ceilings, record, version_files

import torch
from pydantic import ValidationError
from torch import Tensor

VERSIONS = {path.stem.removeprefix("tiny_llama_"): path for path in sorted(ROOT.glob("version[1-3]_*/tiny_llama_v*.py"))}
DTYPES = {name: dtype for dtype, name in SHORT.items()}
WARMUP = 4  # positions that the steps before the first may write to


class Decoder:
    """A version's model with a KV cache: its own layers run, with `attend` in place of their attention."""

    def __init__(self, version: ModuleType, options: Options, length: int, dtype: torch.dtype, cache: ModuleType) -> None:
        """`length`: of the prompt and all that follows; `cache` has the functions of solution/kv_cache.py."""
        self.config, self.device = options.model, devices.select(options.device)
        self.cache, self.whole = cache, version.attention
        version.attention = self.attend  # before the model is made: its layers may keep the function
        with self.device, weights.drawn_on(self.device):
            self.model = version.make_model(options).to(self.device)
        self.tables = self.model.cos, self.model.sin  # [S_max, Dh], which stay float32
        self.model.to(dtype)
        shape = (2, self.config.num_layers, self.config.num_key_value_heads, max(length, WARMUP), self.config.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype, device=self.device)  # [L, K, T, Dh] each
        self.ids = torch.zeros(max(length, WARMUP) + 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)  # of the newest token, which the cache lacks
        self.temperature = 0.0
        self.one: Callable[[Tensor, Tensor], Tensor] = self.logits  # of a decode step

    @torch.no_grad()
    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:  # [S], [S] -> [V], of the token after the last
        self.positions, self.layer = positions, 0
        self.model.cos, self.model.sin = (table[positions] for table in self.tables)  # [S, Dh]
        return self.model.lm_head(self.model.hidden_states(ids[None])[0, -1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [1, H, S, Dh], 2 x [1, K, S, Dh] -> [1, H, S, Dh]
        keys, values = self.keys[self.layer], self.values[self.layer]  # [K, T, Dh]
        self.layer += 1
        self.cache.append(keys, values, k, v, self.positions)
        if q.shape[2] > 1:  # a prompt: nothing stands before it
            return self.whole(q, k, v)
        return self.cache.attend(q, keys, values, self.positions)

    def choose(self, logits: Tensor) -> Tensor:  # [V] -> [1]
        """The likeliest token; with a temperature, token i with the probability softmax(logits / temperature)_i."""
        if not self.temperature:
            return logits.argmax(0, keepdim=True)
        waits = torch.empty_like(logits, dtype=torch.float32).exponential_()  # the first of exponential clocks, p_i their rates
        return ((logits.float() / self.temperature).softmax(0) / waits).argmax(0, keepdim=True)

    def prefill(self, prompt: Tensor) -> None:
        """Reads the prompt, [S], in one pass, and writes the first token."""
        self.ids[: len(prompt)] = prompt
        logits = self.logits(prompt, torch.arange(len(prompt), device=self.device))
        self.position.fill_(len(prompt))
        self.ids.index_copy_(0, self.position, self.choose(logits))

    def step(self) -> None:
        """Writes one more token. No shape changes and the host reads nothing, so that a graph can hold the step."""
        logits = self.one(self.ids[self.position], self.position)
        self.position += 1
        self.ids.index_copy_(0, self.position, self.choose(logits))

    def token_bytes(self, length: int) -> tuple[int, int]:
        """Of the weights, and of the cache of `length` tokens."""
        return self.cache.token_bytes(self.config, length, self.keys.element_size())


def saved(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], Any]:
    """What --save-model has written: sizes, weights under Version 1's names, and the tokenizer. UsageError: it did not."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    try:
        config = ModelConfig.from_transformers(files.read_json(folder / "config.json"))
        state = load_file(folder / "model.safetensors")
    except (KeyError, ValidationError, SafetensorError, OSError) as error:
        raise UsageError(f"--checkpoint: {folder} holds no model that --save-model has written ({error})") from error
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"--checkpoint: {folder} has no tokenizer.json: give a model that was trained on text")
    named = {name.removeprefix("model."): weight for name, weight in state.items()}
    return config, named | {"lm_head.weight": named["embed_tokens.weight"]}, Tokenizer.from_file(str(folder / "tokenizer.json"))


def measure(decoder: Decoder, prompt: Tensor, tokens: int, capture: bool, seed: int) -> tuple[list[float], list[float]]:
    """The ms of prefills, and those of each decode step of the text that stands in `decoder.ids` afterwards."""
    step, device = decoder.step, decoder.device
    for _ in range(WARMUP - 1):  # compiles what is to be compiled; it writes where the prompt will stand
        step()
    decoder.position.zero_()
    if capture:
        step = devices.capture_graph(step)
    prefills = benchmark(lambda: decoder.prefill(prompt), device, warmup=1, iterations=5)
    torch.manual_seed(seed)
    decoder.prefill(prompt)
    clock = Clock(device)
    marks = [clock.mark()]
    for _ in range(tokens - 1):
        step()
        marks.append(clock.mark())
    return prefills, [clock.milliseconds(mark, mark + 1) for mark in marks[:-1]]


def recorded(arguments: Namespace, options: Options, decoder: Decoder, prompt: int, times: tuple[list[float], ...]) -> Decoding:
    """The record: times, and by formula the bytes and FLOPs of the prefill and of a mean decode step."""
    prefill_ms, token_ms = map(summarize, times)
    length = prompt + arguments.tokens // 2  # in the mean
    weight_bytes, cache_bytes = decoder.token_bytes(length)
    one, whole = flops.forward(decoder.config, 1, 1), flops.forward(decoder.config, 1, prompt)
    prefill_flops = whole["total"] - whole["head"] + one["head"]  # the head reads the last position alone
    rate = 1e3 * (weight_bytes + cache_bytes) / token_ms["median"]
    compute = None if arguments.dtype == "fp32" else DTYPES[arguments.dtype]
    peak = ceilings.measure(decoder.device, Precision(decoder.device, compute)) if arguments.measure_peak else None
    return cast(Decoding, record.header(files.schema_of(Decoding), decoder.device, arguments.dtype, model=decoder.config) | {
        "preset": options.preset, "operations": arguments.operations,
        "mode": ", ".join(["compiled"] * arguments.torch_compile + ["captured"] * arguments.capture_step) or "eager",
        "prompt_tokens": prompt, "tokens": arguments.tokens, "prefill_ms": prefill_ms, "token_ms": token_ms,
        "weight_bytes": weight_bytes, "cache_bytes": cache_bytes, "bytes_per_second": rate,
        "copy_percent": peak and 100 * rate / peak["bytes_per_second"], "ceilings": peak,
        "token_intensity": (one["total"] + (length - 1) * one["attention"]) / (weight_bytes + cache_bytes),
        "prefill_flops": prefill_flops, "prefill_intensity": prefill_flops / sum(decoder.token_bytes(prompt)),
    })  # fmt: skip


def report(measured: Decoding) -> str:
    prefill, decode = measured["prefill_ms"]["median"], measured["token_ms"]
    copy = f", {measured['copy_percent']:.1f}% of a measured copy" if measured["copy_percent"] else ""
    return f"""\
prefill  {measured["prompt_tokens"]} tokens in {prefill:.3g} ms; {measured["prefill_intensity"]:,.3g} FLOP/byte
decode   {decode["median"]:.4g} ms a token (p20 {decode["p20"]:.4g}, p80 {decode["p80"]:.4g}), \
{1e3 / decode["median"]:,.4g} tokens/s; {measured["token_intensity"]:,.3g} FLOP/byte
bytes    {measured["weight_bytes"] / 1e6:,.4g} MB of weights and {measured["cache_bytes"] / 1e6:,.3g} MB of cache a token: \
{measured["bytes_per_second"] / 1e9:,.4g} GB/s{copy}"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="a folder that --save-model has written")
    source.add_argument("--prompt-tokens", type=cli.positive, metavar="N", help="random weights, after N random tokens")
    cli.add(result, "--preset", "--config", "--seed", "--device")
    add = result.add_argument
    add("--prompt", default="def ", metavar="TEXT", help="what the text begins with (default: 'def ')")
    add("--tokens", type=cli.positive, default=64, metavar="N", help="tokens to write, at least 2 (default: 64)")
    add("--temperature", type=cli.amount, default=0.0, help="0 writes the likeliest token (default), 1 draws as the model says")
    add("--operations", choices=(*VERSIONS, "fused"), default="v2", help="a version's, or the kernels of decode_kernels.py")
    add("--dtype", choices=DTYPES, help="of weights and cache (default: bf16 on a GPU, fp32 on a CPU)")
    add("--capture-step", action="store_true", help="run a decode step as one CUDA or HIP graph")
    add("--torch-compile", action="store_true", help="compile a decode step")
    add("--exercise", action="store_true", help="the cache of starter/kv_cache.py in place of the solution's")
    add("--measure-peak", action="store_true", help="time a large copy first, for the %% of its rate")
    add("--metrics-out", type=Path, metavar="FILE", help="file for the record")
    return result


def check(arguments: Namespace, config: ModelConfig, prompt: int, device: torch.device) -> None:
    """Raises UsageError where the flags ask for what cannot be."""
    left = config.max_sequence_length - prompt
    if not prompt or not 2 <= arguments.tokens <= left:
        raise UsageError(
            f"a prompt of {prompt} and --tokens {arguments.tokens}: the model has {config.max_sequence_length} positions; give a "
            "prompt of 1 token at least, and 2 or more tokens that find room after it"
        )
    if arguments.capture_step:
        capture.check_supported(device)
    if arguments.torch_compile and arguments.operations in ("v3", "fused"):
        raise UsageError(f"--torch-compile: the operations {arguments.operations} are kernels already; take v1 or v2")


def main() -> None:
    arguments = cli.parse(parser())
    options, device, tokenizer = cli.resolve(Options, arguments), devices.select(arguments.device), None
    torch.manual_seed(options.seed)
    prompt = torch.randint(options.model.vocab_size, (arguments.prompt_tokens or 1,))
    if arguments.checkpoint:
        config, state, tokenizer = saved(arguments.checkpoint)
        options, prompt = replace(options, model=config), torch.tensor(tokenizer.encode(arguments.prompt).ids)
    check(arguments, options.model, len(prompt), device)
    arguments.dtype = arguments.dtype or ("bf16" if devices.is_gpu(device) else "fp32")
    version = version_files.load(VERSIONS["v3" if arguments.operations == "fused" else arguments.operations])
    cache = importlib.import_module(f"decoding.{'starter' if arguments.exercise else 'solution'}.kv_cache")
    length = len(prompt) + arguments.tokens
    decoder = Decoder(version, version_files.switched(version, options), length, DTYPES[arguments.dtype], cache)
    if tokenizer:
        decoder.model.load_state_dict(state)
    decoder.temperature = arguments.temperature
    if arguments.torch_compile:
        sys.modules[version.__name__] = version  # torch.compile looks for globals by the name of their module
        decoder.one = devices.compiled(decoder.logits, device)
    if arguments.operations == "fused":
        from decoding import decode_kernels

        decoder.one = decode_kernels.fused(decoder)
    try:
        times = measure(decoder, prompt.to(device), arguments.tokens, arguments.capture_step, options.seed)
    except NotImplementedError as missing:
        raise UsageError(f"--exercise: {missing}") from missing
    if tokenizer:
        print(tokenizer.decode(decoder.ids[:length].tolist()), end="\n\n")
    measured = recorded(arguments, options, decoder, len(prompt), times)
    print(report(measured))
    if arguments.metrics_out:
        files.write_measurement(arguments.metrics_out, measured, "--metrics-out")


if __name__ == "__main__":
    cli.command(main)

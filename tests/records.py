"""Run records and profiles written by hand."""

import copy
from pathlib import Path

from common.config import ModelConfig
from studies import gemm
from tracepage.files import write_json


def record(**changes) -> dict:
    """A whole run record; `step_ms__median=5` changes a nested value."""
    result = {
        "schema": "tiny-llama-run/1",
        "status": "completed",
        "version": "v1",
        "command": "tiny_llama_v1.py",
        "date": "2026-01-01T00:00:00Z",
        "model": ModelConfig().model_dump(),
        "training": {
            "preset": "tiny",
            "batch_size": 8,
            "sequence_length": 128,
            "num_steps": 20,
            "warmup_steps": 3,
            "seed": 0,
            "learning_rate": 1e-3,
        },
        "precision": {"compute": "fp32", "tf32": False},
        "data": {"name": "stdlib", "tokens": 1000, "sha256": "ab" * 32, "entropy_floor": None},
        "device": {"kind": "cuda", "name": "A GPU", "memory_mib": 1000.0, "multiprocessors": 100},
        "environment": {
            "python": "3.11",
            "platform": "Linux",
            "torch": "2.13.0",
            "cuda": "13.0",
            "hip": None,
        },
        "parameters": 1000,
        "flops_per_step": {"forward": 100, "backward": 200, "total": 300},
        "memory": {"peak_mib": 100.0, "kind": "GPU allocator"},
        "ceilings": None,
        "loss": {"uniform": 6.9, "all": [7.0, 6.0, 5.0]},
        "step_ms": {
            "all": [12.0] * 20,
            "profiled": 0,
            "median": 12.0,
            "p20": 11.0,
            "p80": 13.0,
            "count": 20,
        },
        "tokens_per_second": 85_000.0,
        "flops_per_second": 25_000.0,
        "mfu": None,
    }
    result = copy.deepcopy(result)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = result
        for part in path:
            place = place[part]
        place[last] = value
    if "step_ms__median" in changes:
        result["step_ms"]["all"] = [changes["step_ms__median"]] * result["step_ms"]["count"]
    return result


def profile(run: dict, operators: list[dict], kernels: list[dict] | None = None, **changes) -> dict:
    """A profile of one step of 1 ms; operators and kernels have what they need at least where a key
    is left out.
    """
    place = {"span": "attention", "phase": "forward", "calls": 1}
    times = dict.fromkeys(("cpu_us", "self_cpu_us", "device_us", "self_device_us"), 1.0)
    operator = place | {"input_shapes": "[]", "input_types": "[]", "allocated_bytes": 0} | times
    return {
        "schema": "tiny-llama-profile/1",
        "run": run,
        "trace": "trace_1.json",
        "attention_only": False,
        "profiled_steps": 1,
        "step_us": [1000.0],
        "operators": [operator | row for row in operators],
        "kernels": [place | {"device_us": 1.0} | row for row in kernels or []],
        "device_busy_us": 0.0,
        "launch": {"count": 0, "mean_delay_us": 0.0},
        "memory_peak_bytes": None,
    } | changes


def benchmark(cells: list[dict], **changes) -> dict:
    """A whole benchmark.json with these cells, of one shape."""
    own = {
        key: record()[key]
        for key in ("command", "date", "device", "environment", "model", "precision")
    }
    sizes, lengths = ({cell[key] for cell in cells} for key in ("batch_size", "sequence_length"))
    return (
        own
        | {
            "schema": "tiny-llama-benchmark/1",
            "status": "completed",
            "packages": {},
            "seed": 0,
            "models": list(dict.fromkeys(cell["model"] for cell in cells)),
            "metrics": ["throughput", "memory"],
            "batch_sizes": sorted(sizes),
            "sequence_lengths": sorted(lengths),
            "steps": 2,
            "repeats": 3,
            "cells": cells,
            "accuracy": [],
        }
        | changes
    )


def benchmark_of_shapes(models=("v1", "v2"), metrics=("throughput", "memory", "accuracy")) -> dict:
    """A whole benchmark.json of four shapes.

    v2 takes half the time of v1 (0.4 and 0.6 of it in the two repeats) and a quarter less memory; B
    8, S 16 ran out of it.
    """
    cells = []
    for length in (8, 16):
        for size in (4, 8):
            for model in models:
                full = model == "v2" and (size, length) == (8, 16)
                ms = [1.0 * size * length, 1.0 * size * length]
                ms = [0.4 * ms[0], 0.6 * ms[1]] if model == "v2" else ms
                runs = [
                    {
                        "step_ms": {"median": t, "p20": 0.9 * t, "p80": 1.1 * t, "count": 10},
                        "kind": "GPU allocator",
                        "peak_mib": length * (75.0 if model == "v2" else 100.0),
                    }
                    for t in ms
                ]
                status = (
                    {"status": "out of memory", "reason": "CUDA", "runs": []}
                    if full
                    else {"status": "ok", "reason": None}
                )
                where = {"model": model, "batch_size": size, "sequence_length": length}
                cells.append({"runs": runs} | where | status)
    found = {"logits_error": 1e-7, "gradient_error": 2e-6, "gradient": "norm.weight"}
    accuracy = [
        {"model": model, "batch_size": 4, "sequence_length": 8, "status": "ok", "reason": None}
        | found
        for model in models
    ]
    own = {"packages": {"transformers": "5.0"}, "steps": 10, "repeats": 2, "accuracy": accuracy}
    return benchmark(cells, models=list(models), metrics=list(metrics), **own)


def batch_search(trials: list[dict], found: dict, **changes) -> dict:
    """A whole batch_search.json with these trials and what was found by them, for the target of
    memory.
    """
    run = record(
        settings={"flash_attention": True}, training={"sequence_length": 8, "seed": 0}, **changes
    )
    keys = (
        "command",
        "date",
        "version",
        "device",
        "environment",
        "model",
        "settings",
        "training",
        "precision",
    )
    return (
        {key: run[key] for key in keys}
        | found
        | {
            "schema": "tiny-llama-batch-search/1",
            "memory_kind": "GPU allocator",
            "target": "memory",
            "target_memory_usage": 0.55,
            "trials": trials,
        }
    )


def gemms(config: ModelConfig, grid=((2, 8), (4, 8))) -> dict:
    """A whole gemm_analysis.json: every product of a step runs at a quarter of the GEMM ceiling."""
    peak = 1e12

    def timed(products, point, share):
        for p in products:
            ms = 2 * p.batch * p.m * p.n * p.k / (share * peak) * 1e3
            summary = {"median": ms, "p20": 0.9 * ms, "p80": 1.1 * ms, "count": 9}
            yield (
                {"batch_size": point[0], "sequence_length": point[1]}
                | p._asdict()
                | {"ms": summary, "calls": 90}
            )

    return {
        key: record()[key] for key in ("command", "date", "device", "environment", "precision")
    } | {
        "schema": "tiny-llama-gemms/1",
        "element_bytes": 4,
        "model": config.model_dump(),
        "batch_sizes": [2, 4],
        "sequence_lengths": [8],
        "ceilings": {
            "flops_per_second": peak,
            "bytes_per_second": 1e11,
            "operation_seconds": 1e-12,
            "precision": "fp32",
        },
        "gemms": [
            row for point in grid for row in timed(gemm.products(config, *point), point, 0.25)
        ],
    }


def peers(path: Path, device: str = "A GPU", **ms: float) -> None:
    """A benchmark of one shape: milliseconds per step by model, with - for _."""
    cells = [
        {
            "model": model.replace("_", "-"),
            "batch_size": 8,
            "sequence_length": 128,
            "status": "ok",
            "reason": None,
            "runs": [
                {
                    "step_ms": {"median": time, "p20": time, "p80": time, "count": 2},
                    "peak_mib": 1.0,
                    "kind": "GPU allocator",
                }
            ],
        }
        for model, time in ms.items()
    ]
    write_json(path, benchmark(cells, device=record()["device"] | {"name": device}))


def save_profile(
    folder: Path, run: dict, stamp: object = 1, kernels: list[dict] | None = None, **changes
) -> Path:
    """A profile of the run, with one operator, in `folder`, which is made and returned."""
    folder.mkdir(parents=True, exist_ok=True)
    operator = {
        "name": "aten::mm",
        "input_shapes": "[[2, 2], [2, 2]]",
        "input_types": '["float", "float"]',
    }
    write_json(folder / f"profile_{stamp}.json", profile(run, [operator], kernels, **changes))
    return folder

"""Does a step of Version 2 under fully_shard capture as one CUDA graph?  One case a process:

    torchrun --standalone --nproc-per-node 1 .trial_fsdp.py --preset small --reshard no --out case.json

--collectives: with one process fully_shard launches no collective (`world_size == 1` in
FSDPParamGroup.unshard and foreach_reduce). The flag takes these short cuts away, so that the
all-gathers and reduce-scatters of a group of one really run on fully_shard's streams, as with
several processes.
"""

import argparse
import inspect
import json
import os
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from common import device as devices
from common.precision import Precision, amp_dtype
from common.timing import benchmark, summarize
from common.training import capture, preparation
from studies import version_files

import torch
import torch.distributed as dist

STEPS = 5


def house() -> None:
    """Version 2's own run with the refusal of --capture-step taken out: the flags after --house."""
    import runpy

    from common.training import distributed

    distributed.form = lambda options, forms=(): options.parallel
    if os.environ.get("FSDP_COLLECTIVES"):
        with_collectives()
    script = ROOT / "version2_pytorch_fused/tiny_llama_v2.py"
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


def with_collectives() -> None:
    """Takes the short cuts for a group of one process out of fully_shard."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    group = _fsdp_param_group.FSDPParamGroup

    def changed(function, module, *pairs):
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in pairs:
            assert old in source, f"{function.__name__} has no {old!r}"
            source = source.replace(old, new)
        exec(compile(source, function.__name__, "exec"), module.__dict__)
        return module.__dict__[function.__name__]

    group.unshard = changed(group.unshard, _fsdp_param_group, ("world_size == 1", "world_size == 0"))
    waits = [("world_size == 1", "world_size == 0")]
    if "world_size > 1" in inspect.getsource(group.wait_for_unshard):
        waits.append(("and world_size > 1", "and world_size >= 1"))
    group.wait_for_unshard = changed(group.wait_for_unshard, _fsdp_param_group, *waits)
    reduce = changed(_fsdp_collectives.foreach_reduce, _fsdp_collectives, ("world_size > 1", "world_size >= 1"))
    _fsdp_param_group.foreach_reduce = reduce


CALLS = {"all_gather": 0, "reduce_scatter": 0}


def count_collectives() -> None:
    for kind in CALLS:
        for name in (f"{kind}_into_tensor", f"{kind}_tensor", f"{kind}_single"):
            if hasattr(dist, name):

                def counted(*arguments, call=getattr(dist, name), kind=kind, **more):
                    CALLS[kind] += 1
                    return call(*arguments, **more)

                setattr(dist, name, counted)


def sharded(model, reshard: str):
    """fully_shard as the house does it (`house`), or with one reshard_after_forward for all."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    options = {} if reshard == "house" else {"reshard_after_forward": reshard == "yes"}
    for block in model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "loss")
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="small")
    parser.add_argument("--reshard", choices=("no", "yes", "house"), default="no")
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--warm", choices=("side", "default"), default="side")
    parser.add_argument("--mode", choices=("thread_local", "global"), default="thread_local")
    parser.add_argument("--one-gpu", action="store_true", help="all processes on GPU 0")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--out")
    asked = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0 if asked.one_gpu else rank) if gpu else torch.device("cpu")
    if gpu:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        torch.cuda.set_device(device)
        bound = {} if asked.one_gpu else {"device_id": device}
        dist.init_process_group("nccl", **bound)
        dist.all_reduce(torch.ones(1, device=device))
    else:
        dist.init_process_group("gloo")
    count_collectives()
    if asked.collectives:
        with_collectives()

    flags = ["--preset", asked.preset] + (["--use-amp"] if gpu else [])
    options = version_files.resolve(version_files.parser("").parse_args(flags))
    version = version_files.load(ROOT / "version2_pytorch_fused/tiny_llama_v2.py")
    options = version_files.switched(version, options)
    precision = Precision(device, amp_dtype(options))
    devices.configure(device, 0)
    generator = torch.Generator().manual_seed(rank)
    vocabulary = options.model.vocab_size
    shape = (STEPS, options.batch_size, options.seq_len + 1)
    tokens = torch.randint(vocabulary, shape, generator=generator).to(device)
    batches = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]

    found = vars(asked) | {
        "world_size": world,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "gpu": torch.cuda.get_device_name() if gpu else None,
    }

    def build(parallel: bool):
        torch.manual_seed(0)
        with devices.stream_before_capture() if gpu and asked.warm == "side" else nullcontext():
            model = version.make_model(options).to(device)
            if parallel:
                model = sharded(model, asked.reshard)
            optimizer = version.make_optimizer(model, options)
            if gpu:
                optimizer = preparation.capturable(optimizer, precision)
        return model, optimizer, version.make_step(model, optimizer, precision)

    def five_steps(model, optimizer, step, initial):
        """Losses, and gradients of the first step, from the initial weights."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                preparation.local(parameter).copy_(initial[name])
        for state in optimizer.state.values():
            for value in state.values():
                preparation.local(value).zero_()
        losses, grads = [], {}
        for number, batch in enumerate(batches):
            losses.append(float(step(batch)))
            if number == 0:
                grads = {n: g.clone() for n, g in preparation.gradients(model, optimizer).items()}
        weights = {n: preparation.local(p).detach().clone() for n, p in model.named_parameters()}
        return losses, grads, weights

    def apart(ours: dict, theirs: dict) -> float:
        """The largest relative difference of a tensor."""
        return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp_min(1e-30)) for n in theirs)

    def compared(name, ours, theirs):
        found[name] = {
            "loss": max(abs(a - b) for a, b in zip(ours[0], theirs[0])),
            "gradients": apart(ours[1], theirs[1]),
            "weights_after_5": apart(ours[2], theirs[2]),
        }

    def timed(step):
        return summarize(benchmark(lambda: step(batches[0]), device, 5, asked.iterations))

    try:
        model, optimizer, step = build(parallel=True)
        initial = {n: preparation.local(p).detach().clone() for n, p in model.named_parameters()}
        side = gpu and asked.warm == "side"
        with devices.stream_before_capture() if side else nullcontext():
            for _ in range(capture.PARALLEL_WARMUP):
                step(batches[0])
            eager = five_steps(model, optimizer, step, initial)
            again = five_steps(model, optimizer, step, initial)
        compared("eager_again", again, eager)
        CALLS.update(dict.fromkeys(CALLS, 0))
        step(batches[0])
        found["collectives_a_step"] = dict(CALLS)
        found["losses_fsdp"] = eager[0]
        if gpu:
            if asked.mode == "global":
                capturing = devices.capturing
                devices.capturing = lambda graph, collectives, stream=None: capturing(graph, False, stream)
            try:
                captured = capture.CapturedStep(step, batches[0], parallel=True)
            except Exception as error:
                causes = []
                while error:
                    causes.append(f"{type(error).__name__}: {str(error)[:600]}")
                    error = error.__cause__ or error.__context__
                found["capture"] = causes
            else:
                found["capture"] = "ok"
                found["captured_peak_mib"] = captured.peak_bytes / 2**20
                replayed = five_steps(model, optimizer, captured, initial)
                found["losses_captured"] = replayed[0]
                compared("captured_against_fsdp", replayed, eager)
                found["captured_ms"] = timed(captured)
                found["reserved_mib"] = torch.cuda.memory_reserved() / 2**20
                captured.release()
            # Last: on the default stream.
            torch.cuda.reset_peak_memory_stats()
            found["fsdp_ms"] = timed(step)
            found["fsdp_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        if world == 1 and found.get("capture", "ok") == "ok":
            plain = build(parallel=False)
            alone = five_steps(*plain, initial)
            alone = five_steps(*plain, initial)
            compared("fsdp_against_one_process", eager, alone)
            if gpu:
                found["plain_ms"] = timed(plain[2])
                with devices.stream_before_capture():
                    plain = build(parallel=False)
                    for _ in range(3):
                        plain[2](batches[0])
                graph = capture.CapturedStep(plain[2], batches[0])
                found["plain_captured_ms"] = timed(graph)
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {str(error)[:600]}"
    if rank == 0:
        if asked.out:
            Path(asked.out).write_text(json.dumps(found, indent=1))
        ms = {k: round(found[k]["median"], 3) for k in found if k.endswith("_ms")}
        print(
            f"{asked.preset:7} reshard {asked.reshard:5} collectives {asked.collectives!s:5} warm {asked.warm:7} "
            f"{asked.mode:12} {found.get('collectives_a_step')} | capture {found.get('capture')} | {found.get('failed', '')} "
            f"| vs FSDP {short(found.get('captured_against_fsdp'))} | again {short(found.get('eager_again'))} "
            f"| FSDP vs plain {short(found.get('fsdp_against_one_process'))} | ms {ms}",
            flush=True,
        )
    if gpu:
        torch.cuda.synchronize()
    os._exit(0)  # a broken capture could hold up the end of the process group


def short(values: dict | None) -> str:
    return "-" if values is None else " ".join(f"{k} {v:.2g}" for k, v in values.items())


house() if sys.argv[1:2] == ["--house"] else main()

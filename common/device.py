"""Chooses, prepares and describes the device, so that no tiny_llama_vN.py calls torch.cuda itself.

A CUDA and a ROCm build of PyTorch both answer as `cuda`; `torch.version.hip` tells them apart. On a
CPU the calls that have no meaning do nothing.
"""

import contextlib
import gc
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tracepage.errors import UsageError, first_line

import torch


def select(name: str) -> torch.device:
    """`auto` takes the GPU if there is one. UsageError: a GPU was asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: PyTorch sees no GPU here; use --device cpu, "
            "or install a CUDA or ROCm build of torch"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def configure(
    device: torch.device, seed: int, allow_tf32: bool = False, deterministic: bool = False
) -> None:
    """Seeds PyTorch; `deterministic` makes runs with the same seed on the same device bitwise
    reproducible.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        # PyTorch asks for a fixed workspace of cuBLAS, and by default would fill each allocation.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:1")
        # PyTorch declares no types for it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if (
        allow_tf32
        and is_gpu(device)
        and "gfx942" in getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    ):
        os.environ.setdefault("HIPBLASLT_ALLOW_TF32", "1")  # without it an MI300 multiplies in fp32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32


# In the environment each of these makes torch.compile run eager operations without a word.
COMPILE_OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS")


def compile_problem(device: torch.device) -> str | None:
    """Why torch.compile does not work here (no C++ compiler, no Triton, or it is off); None if it
    does.
    """

    def doubled_sine(x: torch.Tensor) -> torch.Tensor | None:
        return x.sin() * 2 if torch.compiler.is_compiling() else None

    try:
        doubled = torch.compile(doubled_sine)(torch.ones(8, device=device))
    except Exception as error:  # whatever the reason, the caller shows it
        return f"torch.compile does not work here: {first_line(error)}"
    if doubled is None:
        return f"torch.compile compiles nothing here: unset {', '.join(COMPILE_OFF)}"
    return None


def compiled(function: Callable, device: torch.device, on: bool | str = True) -> Callable:
    """torch.compile of a function (`on` may be a mode), or itself if it is off. UsageError:
    torch.compile does not work here.
    """
    if not on:
        return function
    problem = compile_problem(device)
    if problem:
        raise UsageError(problem)
    return torch.compile(function, mode=on if isinstance(on, str) else None)


def synchronize(device: torch.device) -> None:
    if is_gpu(device):
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def stream_before_capture() -> Iterator[None]:
    """Inside it work runs on a stream of its own, as it must before it is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, collectives: bool, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Captures what the code inside it launches; with `collectives` another thread may ask the GPU
    for something meanwhile, as NCCL's does. An error of that code is raised, and not the one with
    which the broken capture then ends.

    A capture fails if Python meanwhile frees another graph or a module of kernels, or if garbage
    still holds the autograd graph of a step on the default stream. So garbage is collected before,
    and what is older than the capture not before its end. PyTorch 2.9 and later leave this to the
    program (pytorch pull request 161037).
    """
    mode = "thread_local" if collectives else "global"
    first = None
    gc.collect()
    gc.freeze()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except RuntimeError as error:
        raise (first or error) from None
    finally:
        gc.unfreeze()


def capture_graph(work: Callable[[], object], times: int = 1) -> Callable[[], None]:
    """Captures a function's work on the GPU, `times` over, as a CUDA or HIP graph; a call of the
    result replays it.

    The function must not wait for the GPU. The memory that it reads and writes stays where it was
    while the graph was captured.
    """
    with stream_before_capture():  # or the capture could take in the warm-up's work
        for _ in range(3):
            work()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, collectives=False):
        for _ in range(times):
            work()
    return graph.replay


def describe(device: torch.device) -> dict[str, Any]:
    """Kind (cpu, cuda or rocm), name, multiprocessors or threads, and MiB of memory."""
    if is_gpu(device):
        properties = torch.cuda.get_device_properties(device)
        kind = "rocm" if torch.version.hip else "cuda"
        return {
            "kind": kind,
            "name": properties.name,
            "memory_mib": properties.total_memory / 2**20,
            "multiprocessors": properties.multi_processor_count,
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
    return {
        "kind": "cpu",
        "name": _cpu_name(),
        "memory_mib": memory,
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Versions that a timing depends on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_peak_was_reset = False


def reset_peak_memory(device: torch.device) -> None:
    """On a CPU only Linux can do so, and not in every sandbox."""
    global _peak_was_reset
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # The resident-set peak starts anew.
        _peak_was_reset = True
    except OSError:
        _peak_was_reset = False


def peak_memory(device: torch.device, graph_bytes: int = 0) -> dict[str, Any]:
    """Peak since `reset_peak_memory`, in MiB: of the allocator on a GPU, of the process's resident
    set on a CPU; since the start of the process where it cannot be reset.

    On a GPU `peak_mib` is what tensors took at once, and `reserved_mib` what the allocator's pools
    held, graphs' pools included. `graph_bytes` is what a captured step allocates at once, which the
    allocator counts only while it is captured.
    """
    if is_gpu(device):
        peak = max(torch.cuda.max_memory_allocated(device), graph_bytes)
        reserved = torch.cuda.max_memory_reserved(device) / 2**20
        return {"peak_mib": peak / 2**20, "kind": "GPU allocator", "reserved_mib": reserved}
    kind = "process RSS" if _peak_was_reset else "process RSS since its start"
    status = _STATUS.read_text() if _STATUS.exists() else ""
    high_water = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    if high_water:
        return {"peak_mib": int(high_water[1]) / 1024, "kind": kind}
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB.
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mib": largest / unit, "kind": "process RSS since its start"}


def limit_memory(device: torch.device, mib: float) -> None:
    """Makes allocations past `mib` fail in this process on a Linux CPU, with an error that
    `is_out_of_memory` knows.

    Otherwise Linux promises more memory than there is, and kills a process when it is used. A GPU's
    allocator refuses by itself.
    """
    if not is_gpu(device) and sys.platform == "linux":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([int(mib * 2**20), *limits]), hard))


# Words of a CPU, of CUDA and HIP, and of their BLAS.
OUT_OF_MEMORY = ("can't allocate memory", "error: out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in OUT_OF_MEMORY
    )

"""What this machine can do for each part of the workshop.

    python -m common.preflight                    # also `make preflight`; takes about a minute
    python -m common.preflight --json FILE.json   # the same for an instructor who collects the files of all attendees

Each check prints one line: ok, or missing with what then does not work and how to mend it. A table of the workshop's parts
follows. The checks also fill caches, so that the first run starts at once: the tokens of the text, and what compilers keep. Exit
code 0 says that Version 1 can be run, 1 that it can't.
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import ROOT, cli, data, sample_gpu, timing
from common import device as devices
from common.config import ModelConfig
from common.errors import UsageError, first_line
from common.files import writable_file, write_json
from common.terminal import progress, wrapped

import torch

SCHEMA = "tiny-llama-preflight/1"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
KFD, RENDER_NODES = Path("/dev/kfd"), Path("/dev/dri")  # of an AMD GPU
NVIDIA_PARAMETERS, STATUS = Path("/proc/driver/nvidia/params"), Path("/proc/self/status")
CAP_SYS_ADMIN = 21  # the number of a bit in CapEff
GIB = 2**30
LEAST_DISK, LEAST_MEMORY = 2 * GIB, 2 * GIB
TENSORBOARD_PORT, TORCHRUN_PORT = 6006, 29500
PRODUCT_SECONDS, SLOW_MS = 60, 100  # for all bf16 products; for one, which takes less than 1 ms on a GPU that has bf16
REPLAYED = 512  # kernels of a graph: where some are lost, nearly all of the first few hundred are seen

# Packages without which some commands do not run, and what these commands do.
OPTIONAL = {
    "matplotlib": "reports draw no plots, and profiled runs fail",
    "tensorboard": "profiled runs fail, because they write event files",
    "deepspeed": "FLOP counts leave DeepSpeed's out",
    "jax": "the JAX half of the profiling lab is skipped",
}
INSTALLED_BY = {"jax": "run `make setup-jax` if you want it (optional)"}
TOOLS = {  # of each vendor: the commands, what does not work without them, and what to install
    "amd": {
        "amd-smi": ("sample_gpu.py needs rocm-smi in its place", "amd-smi-lib"),
        "rocprofv3": ("AMD's profiler gives no times of kernels", "rocprofiler-sdk"),
        "rocprof-sys-run": ("AMD's profiler gives no timeline", "rocprofiler-systems"),
        "rocprof-compute": ("AMD's profiler gives no counters and no roofline", "rocprofiler-compute"),
    },
    "nvidia": {
        "nvidia-smi": ("sample_gpu.py has nothing to ask", "NVIDIA's driver"),
        "nsys": ("NVIDIA's profiler gives no timeline", "Nsight Systems"),
        "ncu": ("NVIDIA's profiler gives no counters", "Nsight Compute"),
    },
}
# Variables that make a run slower than the machine is, or keep it from parts of the machine.
SLOWING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "AMD_LOG_LEVEL", "TRITON_INTERPRET",
           "TORCHDYNAMO_DISABLE", "HIP_FORCE_QUEUE_PROFILING", "HSA_CU_MASK", "ROC_GLOBAL_CU_MASK")  # fmt: skip

RUNS, LIMITS = ("packages", "training", "text"), ("torch", "load", "variables")  # what each part needs, and what limits it
PARTS = {  # name: what it needs, and without what it is limited
    "V1": (RUNS, ("profiler", "matplotlib", "tensorboard", "deepspeed", "disk", "memory", "port 6006")),
    "V2": (RUNS, ("torch.compile", "profiler", "matplotlib", "tensorboard", "attention", "products")),
    "V3": ((*RUNS, "triton"), ("GPU", "GPU memory", "profiler", "GPU formats", "products")),
    "V4": ((*RUNS, "triton"), ("GPU", "GPU memory", "profiler", "torch.compile", "GPU formats", "products", "graphs")),
    "profiling lab": (RUNS, ("profiler", "GPU", "torch.compile", "jax")),
    "performance debugging": (RUNS, ("triton", "GPU", "profiler")),
    "several processes": ((*RUNS, "processes"), ("port 29500",)),
    "vendor profilers": (RUNS, ("GPU", *TOOLS["amd"], *TOOLS["nvidia"], "permissions", "counters")),
}


@dataclass(frozen=True)
class Check:
    """One fact about the machine."""

    name: str
    found: str  # what is there
    without: str = ""  # what does not work, if something is missing
    mend: str = ""  # what would put that right

    @property
    def ok(self) -> bool:
        return not self.without

    def line(self) -> str:
        mended = "" if self.ok else f"; then {self.without}; to mend it: {self.mend}"
        return wrapped(f"  {'ok' if self.ok else 'missing':<8} {self.name:<16} {self.found}{mended}", 28)


# ------------------------------------------------------------------------------------------------- Python and PyTorch


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python() -> Check:
    return Check("python", f"{platform.python_version()}, {platform.platform()}, {sys.executable}")


def pytorch() -> Check:
    [(oldest, limit)] = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', PROJECT)
    versions = devices.environment()
    build = next((f"{name} {versions[name]}" for name in ("cuda", "hip") if versions[name]), "CPU build")
    found = f"{torch.__version__} ({build})"
    if numbers(oldest) <= numbers(torch.__version__) < numbers(limit):
        return Check("torch", found)
    mend = "load or install such a version, run `make clean`, then `make setup`"
    return Check("torch", found, f"the scripts may fail: they are made for {oldest} or newer, below {limit}", mend)


def numbers(version: str) -> list[int]:
    """ "2.13.0+cpu" -> [2, 13]."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def packages() -> Check:
    [block] = re.findall(r"^dependencies = \[(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)
    names = [name for name in re.findall(r'"([\w-]+)>=', block) if name not in OPTIONAL]
    missing = [name for name in names if not version_of(name)]
    if missing:
        return Check("packages", f"no {', '.join(missing)}", "no script runs", "run `make setup`")
    return Check("packages", ", ".join(f"{name} {version_of(name)}" for name in names))


def optional(name: str) -> Check:
    if version := version_of(name):
        return Check(name, version)
    return Check(name, "not installed", OPTIONAL[name], INSTALLED_BY.get(name, "run `make setup`"))


def training(device: torch.device) -> Check:
    """Forward and backward of a small product."""
    x = torch.ones(64, 64)
    try:
        weight = torch.ones(64, 64, device=device, requires_grad=True)
        (x.to(device) @ weight).sum().backward()
        right = weight.grad is not None and torch.equal(weight.grad.cpu(), x.T @ x)
        found = f"a product and its gradient on {devices.describe(device)['name']}" + ("" if right else " are wrong")
    except RuntimeError as error:
        found, right = first_line(error), False
    if right:
        return Check("training", found)
    mend = "see MACHINES.md for this kind of machine, or take --device cpu"
    return Check("training", found, "no version trains on this device", mend)


def text() -> Check:
    try:
        dataset = data.load("stdlib", ModelConfig().vocab_size, seed=0)
    except UsageError as error:
        return Check("text", str(error), "runs need --data synthetic", "set XDG_CACHE_HOME to a folder that can be written to")
    assert dataset.tokenizer
    return Check("text", f"{len(dataset.tokens):,} tokens in {dataset.tokenizer.parent}")


def compiler(device: torch.device) -> Check:
    with progress("compiling with torch.compile"):
        problem = devices.compile_problem(device)
    if not problem:
        return Check("torch.compile", "works")
    mend = "install a C++ compiler (Debian and Ubuntu: apt-get install g++ python3-dev; macOS: xcode-select --install)"
    return Check("torch.compile", problem, "--enable-torch-compile and the compiled peers do not run", mend)


def triton(device: torch.device) -> Check:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    without = "Versions 3 and 4 run PyTorch's operations in place of their kernels"
    if not importlib.util.find_spec("triton"):
        mend = "run `make setup` on Linux; there are no packages for macOS and Windows (on Windows take WSL)"
        return Check("triton", "not installed", without, mend)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if not devices.is_gpu(device):
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "common.triton_probe", device.type]
    with progress("running a Triton kernel"):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        mend = "reinstall torch with its own triton, and a C compiler beside it; without a GPU also `pip install 'numpy<2.4'`"
        return Check("triton", first_line(done.stderr.strip().rpartition("\n")[2]), without, mend)
    here = "interprets a kernel; it compiles for GPUs, but can't run that here"
    return Check("triton", f"{done.stdout.strip()}, {'compiles and runs a kernel' if devices.is_gpu(device) else here}")


def profiler(device: torch.device) -> Check:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.12 and later print two lines of noise per profile
    x = torch.ones(64, 64, device=device)
    kernels = kernels_seen(lambda: x @ x, device)
    if devices.is_gpu(device) and not kernels:
        mend = "run no second profiler at a time; libcupti (NVIDIA) or rocprofiler-sdk (AMD) must belong to this torch"
        return Check("profiler", "torch.profiler sees no kernels", "profiles hold the host's side only", mend)
    return Check("profiler", f"torch.profiler sees {'kernels' if kernels else 'operators'}")


def kernels_seen(work: Callable[[], object], device: torch.device) -> int:
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] * devices.is_gpu(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *on_gpu]) as profile:
        work()
        devices.synchronize(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def attention(device: torch.device) -> Check:
    """The kernel that scaled_dot_product_attention takes for 16 bits, or on a CPU for float32."""
    dtype = (torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16) if devices.is_gpu(device) else None
    q = torch.ones(1, 2, 64, 64, device=device, dtype=dtype, requires_grad=True)
    chosen = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
    if chosen != "MATH" or not devices.is_gpu(device):
        return Check("attention", f"PyTorch takes {chosen}")
    mend = "on RDNA set TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" if torch.version.hip else "none on this GPU"
    return Check("attention", "PyTorch takes MATH", "Version 2's attention writes its S x S scores as Version 1 does", mend)


# ------------------------------------------------------------------------------------------------------- GPU and tools


def vendor() -> str | None:
    """Whose GPU this machine has, as far as PyTorch, the driver and the tools say."""
    if torch.version.hip or KFD.exists():
        return "amd"
    if torch.cuda.is_available() or NVIDIA_PARAMETERS.exists() or shutil.which("nvidia-smi"):
        return "nvidia"
    return None


def gpu(device: torch.device) -> Check:
    if devices.is_gpu(device):
        described = devices.describe(device)
        count = torch.cuda.device_count()
        return Check("GPU", f"{described['name']}, {described['memory_mib'] / 1024:.0f} GiB; GPUs that PyTorch sees: {count}")
    without = "everything runs on the CPU: no GPU times, no tiles, no captured step, and kernels are interpreted"
    none_needed = "nothing has to be done, because each problem has commands for a laptop"
    built_for = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else None
    if platform.system() == "Darwin":
        return Check("GPU", "none that the scripts use (they leave Apple's GPU alone)", without, none_needed)
    if vendor() is None:
        return Check("GPU", "none", without, none_needed)
    found = f"PyTorch sees no GPU of {'AMD' if vendor() == 'amd' else 'NVIDIA'}"
    if built_for == vendor():
        mend = "check driver, permissions, and the variables CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES"
        return Check("GPU", found, without, mend)
    build = "TORCH_BUILD=rocmX.Y, your ROCm" if vendor() == "amd" else "TORCH_BUILD=cu126 where the driver is old"
    mend = f"this torch is built for {built_for or 'CPUs'}: run `make clean`, then `make setup`, with {build}"
    return Check("GPU", found, without, mend)


def gpu_memory(device: torch.device) -> Check:
    free, total = devices.free_memory(device)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free > total / 2:
        return Check("GPU memory", found)
    mend = "wait, or choose another GPU with CUDA_VISIBLE_DEVICES (AMD: ROCR_VISIBLE_DEVICES)"
    return Check("GPU memory", found, "another process disturbs the times, and large presets may not fit", mend)


def formats() -> Check:
    """Free Colab's T4 has no bf16."""
    if torch.cuda.is_bf16_supported(False):
        return Check("GPU formats", "bf16")
    return Check("GPU formats", "no bf16", "--use-amp needs --amp-dtype float16", "choose another GPU")


def slowest_product() -> tuple[float, str]:
    """Milliseconds of the slowest bf16 product of 1024 x 1024, and which factors were transposed."""
    plain, times = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16), []
    for layout in ("NN", "NT", "TN", "TT"):
        a, b = (plain.T if letter == "T" else plain for letter in layout)
        times.append((min(timing.benchmark(functools.partial(torch.matmul, a, b), plain.device, warmup=1, iterations=2)), layout))
    return max(times)


def products() -> Check:
    """In a process of its own: on some GPUs hipBLASLt searches 600 ms for each product, or for minutes."""
    code, slow = "from common.preflight import slowest_product; print(*slowest_product())", True
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PRODUCT_SECONDS)
        found = first_line(done.stderr.strip().rpartition("\n")[2])
        if not done.returncode:
            ms, layout = done.stdout.split()
            found, slow = f"bf16 takes at most {float(ms):.3g} ms (1024 x 1024, layout {layout})", float(ms) > SLOW_MS
    except subprocess.TimeoutExpired:
        found = f"bf16 takes more than {PRODUCT_SECONDS} s"
    if not slow:
        return Check("products", found)
    mend = "set TORCH_BLAS_PREFER_HIPBLASLT=0 (see MACHINES.md)" if torch.version.hip else "see if others use this GPU"
    return Check("products", found, "--use-amp may take minutes for a step", mend)


def graphs(device: torch.device) -> Check:
    """Whether torch.profiler sees each kernel of a replayed graph, as of a captured step."""
    x = torch.ones(64, device=device)

    def work() -> None:
        for _ in range(REPLAYED):
            x.add_(1)

    eager, replayed = kernels_seen(work, device), kernels_seen(devices.capture_graph(work), device)
    found = f"torch.profiler sees {replayed} of {eager} kernels of a replayed graph"
    if replayed >= eager:
        return Check("graphs", found)
    mend = "profile with --no-capture-step, or take a PyTorch whose own libraries are of ROCm 7.2.2 or newer"
    return Check("graphs", found, "profiles of captured steps are short", mend)


def tool(maker: str, name: str) -> Check:
    path, (without, package) = shutil.which(name), TOOLS[maker][name]
    if not path:
        mend = f"install {package} or load its module, and put its folder on PATH"
        return Check(name, "not on PATH", without, mend)
    if name in sample_gpu.TOOLS:
        if gpus := len(sample_gpu.read(name)):
            return Check(name, f"{path}, reports {gpus} GPU{'s' * (gpus > 1)}")
        return Check(name, f"{path} reports no GPU", without, "check that the driver is loaded and matches the tool")
    return Check(name, path)


def permissions(device: torch.device) -> Check:
    """Of an AMD GPU: its device files must be readable and writable."""
    import grp  # Windows has none

    if devices.is_gpu(device):
        return Check("permissions", "PyTorch reaches the GPU")
    if not KFD.exists():
        mend = "load the driver amdgpu; a container needs --device=/dev/kfd --device=/dev/dri"
        return Check("permissions", f"there is no {KFD}", "ROCm sees no GPU", mend)
    nodes = [KFD, *sorted(RENDER_NODES.glob("renderD*"))]
    closed = [path for path in nodes if not os.access(path, os.R_OK | os.W_OK)]
    groups = {entry.gr_gid: entry.gr_name for entry in grp.getgrall()}
    mine = ", ".join(sorted(groups.get(number, str(number)) for number in os.getgroups()))
    if not closed:
        return Check("permissions", f"{', '.join(map(str, nodes))} are open to this user (groups {mine})")
    owners = sorted({groups.get(path.stat().st_gid, str(path.stat().st_gid)) for path in closed})
    group = closed[0].stat().st_gid
    mend = f"sudo usermod -a -G {','.join(owners)} $LOGNAME, then log in again; in a container add --group-add {group}"
    return Check("permissions", f"{closed[0]} is closed to this user (groups {mine})", "ROCm sees no GPU", mend)


def counters() -> Check:
    """Of an NVIDIA GPU: whether ncu may read them."""
    parameters = NVIDIA_PARAMETERS.read_text() if NVIDIA_PARAMETERS.exists() else ""
    capabilities = re.findall(r"^CapEff:\s*(\w+)", STATUS.read_text() if STATUS.exists() else "", re.MULTILINE)
    privileged = any(int(bits, 16) >> CAP_SYS_ADMIN & 1 for bits in capabilities)
    if "RmProfilingAdminOnly: 1" in parameters and not privileged:
        mend = (
            "the administrator sets `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d and restarts; a "
            "container is started with --cap-add=SYS_ADMIN"
        )
        return Check("counters", "the driver keeps them for administrators", "ncu ends with ERR_NVGPUCTRPERM", mend)
    return Check("counters", "this user may read them" if parameters else "the driver does not say who may read them")


# ------------------------------------------------------------------------------------------------- the machine itself


def processes() -> Check:
    """A collective operation of one process: gloo has to find a network address."""
    import torch.distributed as dist

    without, mend = "runs under torchrun fail", "set GLOO_SOCKET_IFNAME=lo (macOS: lo0), or put this host's name into /etc/hosts"
    if not dist.is_available():
        return Check("processes", "this torch is built without torch.distributed", without, "install another build of torch")
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except RuntimeError as error:
        return Check("processes", first_line(error), without, mend)
    return Check("processes", f"gloo works, {os.cpu_count()} CPU cores")


def port(number: int, user: str, flag: str) -> Check:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
        except OSError as error:
            return Check(f"port {number}", first_line(error.strerror), f"{user} can't take it", f"give {user} another {flag}")
    return Check(f"port {number}", f"free for {user}")


def disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / GIB:.1f} GiB free in {Path.cwd()}"
    if free > LEAST_DISK:
        return Check("disk", found)
    return Check("disk", found, "traces and checkpoints may not fit", f"make room: {LEAST_DISK // GIB} GiB or more")


def memory() -> Check:
    total = devices.describe(torch.device("cpu"))["memory_mib"] * 2**20
    found = f"{total / GIB:.1f} GiB for a process"
    if total > LEAST_MEMORY:
        return Check("memory", found)
    return Check("memory", found, "only the preset tiny fits", f"take a machine or a job with {LEAST_MEMORY // GIB} GiB or more")


def load() -> Check:
    wanted, cores = devices.load()
    found = f"{wanted:.1f} processes on {cores} cores in the last minute"
    if wanted <= cores:
        return Check("load", found)
    mend = "end other programs; until then OMP_NUM_THREADS=1 keeps threads from waiting for each other"
    return Check("load", found, "a step on the CPU can take many times as long, and times vary", mend)


def variables() -> Check:
    found = [f"{name}={os.environ[name]}" for name in SLOWING if os.environ.get(name, "0") != "0"]
    if found:
        return Check("variables", ", ".join(found), "no time that is measured counts", "unset them in the shell that measures")
    return Check("variables", "none is set that slows a run")


# ------------------------------------------------------------------------------------------------------ the whole flight


def checks(device: torch.device) -> Iterator[Check]:
    """Each check as soon as it is made."""
    yield python()
    yield pytorch()
    yield load()  # before the checks that are work themselves
    yield packages()
    yield from map(optional, OPTIONAL)
    yield gpu(device)
    if devices.is_gpu(device):
        yield gpu_memory(device)
        yield formats()
    yield training(device)
    yield text()
    for check in (profiler, attention, triton, compiler):
        yield check(device)
    if devices.is_gpu(device):
        yield products()
        yield graphs(device)
    if maker := vendor():
        yield from (tool(maker, name) for name in TOOLS[maker])
        yield permissions(device) if maker == "amd" else counters()
    for of_machine in (processes, disk, memory, variables):
        yield of_machine()
    yield port(TENSORBOARD_PORT, "tensorboard", "--port")
    yield port(TORCHRUN_PORT, "torchrun", "--master-port")


def parts(found: Sequence[Check]) -> dict[str, tuple[str, list[str]]]:
    """The state of each part of the workshop (ready, limited, not), and the checks that make it so."""
    missing = [check.name for check in found if not check.ok]
    result = {}
    for name, (needed, wanted) in PARTS.items():
        lacks = [[check for check in missing if check in names] for names in (needed, (*LIMITS, *wanted))]
        result[name] = ("not" if lacks[0] else "limited" if lacks[1] else "ready", lacks[0] or lacks[1])
    return result


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="also write the checks and the parts as JSON")
    options = parser.parse_args()
    path = writable_file(options.json, "--json") if options.json else None
    found = []
    for check in checks(devices.select("auto")):
        found.append(check)
        print(check.line(), flush=True)
    states = parts(found)
    print("\n  part                    state    for want of")
    for name, (state, lacks) in states.items():
        print(f"  {name:<23} {state:<8} {', '.join(lacks)}".rstrip())
    if path:
        rows = [asdict(check) | {"ok": check.ok} for check in found]
        table = [{"part": name, "state": state, "for_want_of": lacks} for name, (state, lacks) in states.items()]
        write_json(path, {"schema": SCHEMA, "environment": devices.environment(), "checks": rows, "parts": table})
    ready = states["V1"][0] != "not"
    print("\nVersion 1 can be run" if ready else "\nVersion 1 can't be run: mend what is missing for it first")
    return 0 if ready else 1


if __name__ == "__main__":
    cli.command(main)

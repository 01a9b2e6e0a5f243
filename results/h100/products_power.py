"""Products of medium, sustained, by layout and data: TFLOP/s, MHz and W over the second half of each. Wrote products_power.json."""

import ctypes
import json
import sys
import time

import torch

nvml, gpu = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode(), ctypes.byref(gpu))
rows = []


def mhz() -> int:
    value = ctypes.c_uint()
    nvml.nvmlDeviceGetClockInfo(gpu, 1, ctypes.byref(value))
    return value.value


def joules() -> float:
    value = ctypes.c_ulonglong()
    nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(value))
    return value.value / 1e3


def operand(rows: int, columns: int, transposed: bool, data: str) -> torch.Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.zeros(shape, device="cuda") if data == "zeros" else torch.randn(shape, device="cuda")
    x = x.to(torch.float8_e4m3fn).float() if data == "8bit" else x
    return x.bfloat16().T if transposed else x.bfloat16()


def sustained(name: str, m: int, n: int, k: int, ta: bool, tb: bool, data: str, seconds: float = 2.4) -> None:
    a, b = operand(m, k, ta, data), operand(k, n, tb, data)
    out, graph, repeats = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph(), int(2e13 / (2 * m * n * k))
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(max(1, repeats)):
            torch.mm(a, b, out=out)
    begin, clocks, done, start = time.perf_counter(), [], 0, None
    while time.perf_counter() < begin + seconds:
        graph.replay()
        torch.cuda.synchronize()
        now = time.perf_counter()
        if start is None and now > begin + 0.5 * seconds:
            start, before = now, joules()
        elif start:
            done, last = done + max(1, repeats), now
            clocks.append(mhz())
    watts = (joules() - before) / (last - start)
    rows.append({
        "name": name, "M": m, "N": n, "K": k, "layout": "NT"[ta] + "NT"[tb], "data": data,
        "tflops": 2e-12 * m * n * k * done / (last - start), "mhz": sum(clocks) / len(clocks), "watts": watts,
    })


sustained("heat", 8192, 8192, 8192, False, True, "normal", 4)
for data in ("normal", "zeros", "8bit"):
    sustained("large", 8192, 8192, 8192, False, True, data)
shapes = {"gate_up": (8192, 8192, 1024), "down": (8192, 1024, 4096), "d_gates": (8192, 1024, 8192), "square4k": (4096, 4096, 4096)}
for name, shape in (*list(shapes.items())[:3], ("dW gate_up", (8192, 1024, 8192)), ("square4k", shapes["square4k"])):
    layouts = ((True, False), (False, True)) if name == "dW gate_up" else ((False, True), (False, False), (True, False), (True, True))
    for ta, tb in layouts:
        sustained(name, *shape, ta, tb, "normal", 2)
for data in ("zeros", "8bit"):
    sustained("gate_up", *shapes["gate_up"], False, True, data)
sustained("large", 8192, 8192, 8192, False, True, "normal")
json.dump(rows, open(sys.argv[1], "w"), indent=1)

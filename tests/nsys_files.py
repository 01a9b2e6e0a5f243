"""Databases as `nsys export --type sqlite` writes them, of the columns that NVIDIA documents."""

import sqlite3
from contextlib import closing
from pathlib import Path

ACTIVITY = "CUPTI_ACTIVITY_KIND_"
PLACE = "start, end, deviceId, streamId, correlationId, globalPid"
COLUMNS = {
    "StringIds": "id, value",
    f"{ACTIVITY}RUNTIME": "start, end, globalTid, correlationId, nameId",
    f"{ACTIVITY}KERNEL": f"{PLACE}, demangledName, shortName, gridX, gridY, gridZ",
    f"{ACTIVITY}MEMCPY": f"{PLACE}, bytes, copyKind, srcKind, dstKind",
    f"{ACTIVITY}MEMSET": f"{PLACE}, bytes, memKind",
    f"{ACTIVITY}GRAPH_TRACE": f"{PLACE}, graphId",
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
    "OSRT_API": "start, end, globalTid, nameId",
    "TARGET_INFO_GPU": "id, name, smCount, totalMemory",
    "TARGET_INFO_CUDA_DEVICE": "gpuId, cudaId, pid",
    "META_DATA_CAPTURE": "name, value",
    "DIAGNOSTIC_EVENT": "severity, text",
}
PROCESS = 0x1234 << 24 | 7  # With the bits of a machine above those of the number 7.
PUSH_POP, MARK = 59, 34
KINDS = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
MEMORY = ("Pageable", "Pinned", "Device")


class Export:
    """The rows of a database, times in ns."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple]] = {}
        self.strings: dict[str, int] = {}

    def add(self, table: str, *row) -> None:
        self.rows.setdefault(table, []).append(row)

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, 100 + len(self.strings))

    def call(self, name: str, start: int, end: int, number: int, thread=1, process=PROCESS) -> None:
        place = (process << 24) + thread
        self.add(f"{ACTIVITY}RUNTIME", start, end, place, number, self.text(name))

    def kernel(
        self, name: str, start: int, end: int, number: int, process=PROCESS, device=0
    ) -> None:
        place = (start, end, device, 7, number, process << 24)
        self.add(f"{ACTIVITY}KERNEL", *place, self.text(name), self.text(name), 4, 2, 1)

    def launched(self, name: str, start: int, end: int, number: int, call: int, **where) -> None:
        """A kernel, and the call of 1 us that launched it."""
        thread = where.pop("thread", 1)
        process = where.get("process", PROCESS)
        self.call("cudaLaunchKernel_v7000", call, call + 1000, number, thread, process)
        self.kernel(name, start, end, number, **where)

    def range(self, text: str, start: int, end: int, thread=1, process=PROCESS) -> None:
        place = (process << 24) + thread
        self.add("NVTX_EVENTS", start, end, PUSH_POP, text, None, place)

    def write(self, path: Path) -> Path:
        self.rows["StringIds"] = [(number, text) for text, number in self.strings.items()]
        with closing(sqlite3.connect(path)) as database, database:
            for table, rows in self.rows.items():
                columns = [f'"{name}"' for name in COLUMNS[table].split(", ")]
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                marks = ", ".join("?" * len(columns))
                database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        return path


def of_trace(events: list[dict], operators: bool = True) -> Export:
    """What nsys would have written of the program of a trace of torch.profiler, with a range for
    each step, and of operators under `torch.autograd.profiler.emit_nvtx(record_shapes=True)`.
    """
    export = Export()
    threads = sorted({event["tid"] for event in events if isinstance(event.get("tid"), int)})
    for event in events:
        if event.get("ph") != "X":
            continue
        arguments = event.get("args", {})
        start = round(1000 * event["ts"])
        end = start + round(1000 * event["dur"])
        category = event.get("cat")
        name = event["name"]
        thread = threads.index(event["tid"]) if event["tid"] in threads else 0
        number = arguments.get("correlation")
        if category == "user_annotation":
            export.range(name.replace("ProfilerStep#", "step "), start, end, thread)
        elif category == "cpu_op" and operators:
            sequence = arguments.get("Sequence number")
            text = name if sequence is None else f"{name}, seq = {sequence}"
            dims = arguments.get("Input Dims", [])
            shapes = [shape if isinstance(shape, list) else [] for shape in dims]
            text += f", op_id = 5, sizes = {shapes}, input_op_ids = [(3,0)]"
            export.range(text, start, end, thread)
        elif category == "cuda_runtime":
            export.call(f"{name}_v7000", start, end, number, thread)
        elif category == "cuda_driver":
            export.call(name, start, end, number, thread)
        elif category == "kernel":
            place = (start, end, 0, arguments.get("stream"), number, PROCESS << 24)
            grid = arguments.get("grid", (0, 0, 0))
            export.add(f"{ACTIVITY}KERNEL", *place, export.text(name), export.text(name), *grid)
        elif category == "gpu_memcpy":
            _, kind, source, _, target = name.translate(str.maketrans("()", "  ")).split()
            kinds = (KINDS[kind], MEMORY.index(source), MEMORY.index(target))
            place = (start, end, 0, arguments.get("stream"), number, PROCESS << 24)
            export.add(f"{ACTIVITY}MEMCPY", *place, 16, *kinds)
        elif category == "gpu_memset":
            place = (start, end, 0, arguments.get("stream"), number, PROCESS << 24)
            export.add(f"{ACTIVITY}MEMSET", *place, 16, MEMORY.index("Device"))
    return export

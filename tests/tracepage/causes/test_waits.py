"""Causes of waits in traces of a program that a clock of host and device plays: what the step takes
without a fault is known.
"""

import json
import re
from pathlib import Path

from tests.small_traces import event
from tracepage.causes import waits
from tracepage.readers import load_kernels
from tracepage.readers.source import make_source
from tracepage.terminal import format_time

import pandas
import pytest

RESULTS = Path(__file__).parents[3] / "results"
STEPS = 3
FAULT = 20_000  # us
MAIN, BACKWARD = 1, 2


class Program:
    """Plays a training program: the host launches, the device runs in order. Times in us."""

    def __init__(self, prefix: str = "cuda"):
        self.prefix = prefix
        self.events = []
        self.host = 0.0
        self.device = 0.0
        self.correlation = 0
        self.thread = MAIN
        self.multiprocessors = 100

    def add(self, category, name, start, end, **arguments):
        self.events.append(event(category, name, start, end, self.thread, **arguments))

    def python(self, us):
        self.host += us

    def operator(self, name, us):
        self.add("cpu_op", name, self.host, self.host + us)
        self.host += us

    def call(self, name, us):
        self.add("cuda_runtime", f"{self.prefix}{name}", self.host, self.host + us)
        self.host += us

    def annotation(self, name, us):
        self.add("user_annotation", name, self.host, self.host + us)
        self.host += us

    def kernel(self, us, name="gemm", host=20, blocks=100, stream=7):
        """An operator that launches a kernel in its middle."""
        self.correlation += 1
        call = self.host + host / 2
        self.add("cpu_op", "aten::mm", self.host, self.host + host)
        launch = f"{self.prefix}LaunchKernel"
        self.add("cuda_runtime", launch, call, call + host / 4, correlation=self.correlation)
        self.run("kernel", name, max(self.device, call + 5), us, blocks, stream)
        self.host += host

    def run(self, category, name, start, us, blocks=0, stream=7):
        arguments = {"correlation": self.correlation, "stream": stream}
        if blocks:
            arguments["grid"] = [blocks, 1, 1]
        kernel = event(category, name, start, start + us, **arguments)
        self.events.append(kernel | {"pid": 0, "tid": stream})
        self.device = start + us

    def copy(self, us, name="Memcpy HtoD (Pageable -> Device)", operator="aten::copy_"):
        """A copy of which the host waits for the end: in its call, or after it if memory is pinned."""
        self.correlation += 1
        begin = self.host
        start = max(self.device, begin + 10)
        end = start + us + 5
        returned = begin + 10 if "Pinned" in name else end - 1
        call = f"{self.prefix}Memcpy{'Async' if self.prefix == 'cuda' else 'WithStream'}"
        self.add("cpu_op", operator, begin, end)
        self.add("cuda_runtime", call, begin + 5, returned, correlation=self.correlation)
        if returned < end - 1:
            self.add("cuda_runtime", f"{self.prefix}StreamSynchronize", returned, end)
        self.run("gpu_memcpy", name, start, us)
        self.host = end

    def item(self):
        self.copy(2, "Memcpy DtoH (Device -> Pinned)", "aten::item")

    def synchronize(self, name="DeviceSynchronize"):
        end = max(self.host, self.device) + 5
        self.call(name, end - self.host)

    def work(self, kernels=20, us=200, host=20):
        """A forward pass in the main thread, a backward pass in the engine's."""
        for number in range(kernels):
            self.thread = MAIN if number < kernels / 2 else BACKWARD
            self.kernel(us, host=host)
            self.python(5)
        self.thread = MAIN

    def save(self, path):
        content = {
            "deviceProperties": [{"id": 0, "name": "GPU", "numSms": self.multiprocessors}],
            "traceEvents": self.events,
        }
        path.write_text(json.dumps(content))
        return path


def attribute(folder, step, prefix="cuda"):
    """The causes of a program whose steps are these, and its trace."""
    program = Program(prefix)
    program.work(2)
    for number in range(STEPS):
        begin = program.host
        step(program)
        program.add("user_annotation", f"ProfilerStep#{number}", begin, program.host)
    source = load_kernels.load(program.save(folder / "trace.json"))
    causes = waits.attribute(source)
    assert sum(part["ms"] for part in causes.parts) == pytest.approx(causes.step_ms, rel=1e-3)
    return causes


def parts(causes):
    """ms by cause."""
    frame = pandas.DataFrame(causes.parts)
    return frame.groupby("cause").ms.sum().to_dict()


def copies_then_python(program, us):
    for _ in range(20):
        program.copy(50, "Memcpy DtoH (Device -> Pageable)")
        program.python(us / 20)


FAULTS = {
    "input": lambda program, us: program.annotation("enumerate(DataLoader)#_Iter.__next__", us),
    "allocation": lambda program, us: program.call("Malloc", us),
    "compilation": lambda program, us: program.operator("compile (dynamo_timed)", us),
    "cpu_operators": lambda program, us: program.operator("aten::randn", us),
    "host": lambda program, us: program.python(us),
    "saving": copies_then_python,
    "copy_to_device": lambda program, us: program.copy(us),
    "copy_to_host": lambda program, us: program.copy(us, "Memcpy DtoH (Device -> Pageable)"),
    "communication": lambda program, us: program.kernel(us, "ncclDevKernel_AllReduce_Sum_f32"),
}


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_is_named_and_the_step_without_it_is_bounded(tmp_path, cause, prefix):
    def step(program):
        FAULTS[cause](program, FAULT)
        program.work()

    causes = attribute(tmp_path, step, prefix)
    healthy = attribute(tmp_path, lambda program: program.work())
    assert causes.verdict["cause"] == cause, causes.verdict["sentence"]
    without = causes.step_ms / causes.verdict["gain"]
    assert without == pytest.approx(healthy.step_ms, rel=0.1)
    assert causes.verdict["sentence"].count(f"{causes.verdict['ms']:.3g} ms") >= 1


@pytest.mark.parametrize("cause", FAULTS)
def test_a_longer_fault_moves_its_own_part_by_as_much(tmp_path, cause):
    def faulty(us):
        def step(program):
            FAULTS[cause](program, us)
            program.work()

        return parts(attribute(tmp_path, step))

    short = faulty(FAULT)
    long = faulty(FAULT + 3_000)
    assert long.pop(cause) - short.pop(cause) == pytest.approx(3, abs=0.01)
    assert long == pytest.approx(short, abs=0.01)


def layers(program, wait):
    """Kernels of 30 us, a launch of which takes 25, and a wait of the host after each fifth."""
    for number in range(100):
        program.kernel(30, host=25)
        if number % 5 == 4:
            wait(program)


@pytest.mark.parametrize("wait", ["item", "synchronize"])
def test_what_a_synchronization_empties_is_refilled_at_its_cost(tmp_path, wait):
    causes = attribute(tmp_path, lambda program: layers(program, getattr(Program, wait)))
    healthy = attribute(tmp_path, lambda program: layers(program, lambda program: None))
    assert causes.verdict["cause"] == "synchronization"
    without = causes.step_ms / causes.verdict["gain"]
    assert without == pytest.approx(healthy.step_ms, rel=0.1)
    assert healthy.verdict["cause"] == "work" and healthy.verdict["gain"] == 1


def test_a_debt_is_paid_in_gaps_of_launches_after_it(tmp_path):
    """The host waits for 2 ms of work, then launches 100 kernels that are shorter than launches."""

    def step(program):
        program.kernel(2_000, host=20)
        program.item()
        program.work(kernels=100, us=10, host=25)

    causes = attribute(tmp_path, step)
    ms = parts(causes)
    assert ms["synchronization"] == pytest.approx(2, abs=0.1)
    assert ms["launches"] == pytest.approx(100 * 0.02 - 2, abs=0.1)


def test_the_debt_of_the_last_wait_is_paid_first(tmp_path):
    """Python and then a synchronization, both beside 2 ms of work, and 0.4 ms of gaps."""

    def step(program):
        program.kernel(2_000)
        program.python(1_000)
        program.item()
        program.work(kernels=20, us=10, host=25)

    ms = parts(attribute(tmp_path, step))
    assert ms["synchronization"] == pytest.approx(0.4, abs=0.05) and "host" not in ms


def test_a_copy_waits_though_the_clocks_of_host_and_device_differ_a_little(tmp_path):
    """By the clock of the device a copy ends 6 us after its call has returned."""

    def step(program):
        program.kernel(2_000)
        program.copy(2, "Memcpy DtoH (Device -> Pageable)")
        program.events[-1]["ts"] += 10
        program.work(kernels=100, us=10, host=25)

    ms = parts(attribute(tmp_path, step))
    assert ms["synchronization"] == pytest.approx(2, abs=0.1) and ms["launches"] < 0.1


def test_a_host_that_no_longer_waits_may_hide_its_other_waits(tmp_path):
    """The trace begins after a wait whose lead would have hidden the launches."""

    def step(program):
        program.python(5_000)
        program.work(kernels=100, us=11, host=26)

    causes = attribute(tmp_path, step)
    ms = parts(causes)
    rest = causes.step_ms - ms["host"]
    sentence = causes.verdict["sentence"]
    least = f"between {format_time(ms['work'])} (the host always ahead)"
    assert f"Without it: {least} and {format_time(rest)} (" in sentence and ms["launches"] > 1

    causes = attribute(tmp_path, lambda program: FAULTS["host"](program, FAULT) or program.work())
    assert "always ahead" not in causes.verdict["sentence"]


def test_launches_name_the_span_that_makes_most_of_them_wait(tmp_path):
    def step(program):
        program.work(kernels=50, us=10, host=25)
        begin = program.host
        for _ in range(100):
            program.kernel(10, host=30)
        program.add("user_annotation", "Optimizer.step#AdamW.step", begin, program.host)

    sentence = attribute(tmp_path, step).verdict["sentence"]
    assert re.search(
        r"in 1\d\d waits a step: (99|100) of them \([\d.]+ ms\) in optimizer", sentence
    )
    assert "`fused=True`" in sentence


def test_a_copy_has_its_bytes_and_its_speed(tmp_path):
    def step(program):
        program.work()
        program.copy(FAULT)
        program.events[-1]["args"]["bytes"] = 2**28

    sentence = attribute(tmp_path, step).verdict["sentence"]
    assert "in 1 wait a step: aten::copy_ (100 %), 256 MiB in 20 ms (13.4 GB/s)." in sentence


def test_a_checkpoint_is_one_wait_with_all_its_copies(tmp_path):
    def step(program):
        copies_then_python(program, FAULT)
        program.work()

    causes = attribute(tmp_path, step)
    assert ", in 1 wait a step: aten::copy_" in causes.verdict["sentence"]
    whole = format_time(causes.verdict["ms"])
    assert f" The longest took {', '.join([whole] * STEPS)}." in causes.verdict["sentence"]


@pytest.mark.parametrize("us, saves", [(400, False), (600, True)])
def test_copies_are_saving_from_half_of_their_time_in_no_operator_on(tmp_path, us, saves):
    def step(program):
        program.work()
        for _ in range(20):
            program.copy(50, "Memcpy DtoH (Device -> Pageable)")
        program.python(us)

    assert ("saving" in parts(attribute(tmp_path, step))) == saves


def test_python_before_the_first_operator_is_at_the_start_of_the_step(tmp_path):
    def step(program):
        program.python(FAULT)
        program.work()
        program.python(9_000)
        program.work()

    where = attribute(tmp_path, step).gaps.sort_values("duration_ns")["where"]
    assert where.iloc[-1] == "at the start of the step, before aten::mm"
    assert "between aten::mm and aten::mm" in set(where)


def test_work_names_its_two_largest_kinds_and_their_longest_kernels(tmp_path):
    def step(program):
        program.kernel(6_000, "ampere_sgemm_128x64_nn")
        program.kernel(3_000, "softmax")
        program.kernel(1_000, "vectorized_elementwise_kernel")

    sentence = attribute(tmp_path, step).verdict["sentence"]
    assert "no wait that is worth removing" in sentence
    assert re.search(r"matrix products 6 ms \(\d+ %\): ampere_sgemm_128x64_nn \(100 %\)", sentence)
    assert "reductions 3 ms" in sentence and "elementwise" not in sentence
    assert "in bf16" in sentence and "Fuse reductions" in sentence


def test_a_synchronization_of_an_empty_queue_leaves_the_cause_to_launches(tmp_path):
    def step(program):
        program.work(kernels=100, us=2, host=50)
        program.item()

    causes = attribute(tmp_path, step)
    assert causes.verdict["cause"] == "launches"
    assert parts(causes)["synchronization"] < 0.02 * causes.step_ms


def test_a_longer_launch_costs_as_much_where_the_gpu_waits_for_it(tmp_path):
    def launching(host):
        return attribute(tmp_path, lambda program: program.work(100, 2, host))

    short = launching(50)
    long = launching(60)
    assert short.verdict["cause"] == "launches"
    assert parts(long)["launches"] - parts(short)["launches"] == pytest.approx(1, rel=0.03)
    assert parts(long)["work"] == pytest.approx(parts(short)["work"])


def test_python_between_launches_is_part_of_launching_unless_it_lasts(tmp_path):
    def step(program):
        for _ in range(20):
            program.work(kernels=5, us=2, host=20)
            program.python(50)
        program.python(1_000)

    ms = parts(attribute(tmp_path, step))
    assert ms["host"] == pytest.approx(1 + 0.05, abs=0.02)


def test_a_few_long_stretches_do_not_hide_one_that_is_long_among_the_usual(tmp_path):
    """The usual stretch takes 25 us, so 400 us are something of its own beside 20 ms, too."""

    def step(program):
        program.python(FAULT)
        program.work(kernels=10, us=2)
        program.python(400)
        program.work(kernels=10, us=2)

    assert parts(attribute(tmp_path, step))["host"] == pytest.approx(20.4, abs=0.2)


@pytest.mark.parametrize("us, waits_in_it", [(700, False), (2_000, True)])
def test_a_collective_waits_on_the_host_only_if_it_takes_long_there(tmp_path, us, waits_in_it):
    def step(program):
        program.work()
        program.synchronize()
        program.operator("c10d::allreduce_", us)

    ms = parts(attribute(tmp_path, step))
    cause = "communication" if waits_in_it else "cpu_operators"
    assert ms[cause] == pytest.approx(us / 1e3, abs=0.05)
    assert ("communication" in ms) == waits_in_it


def test_what_the_host_does_beside_a_busy_device_costs_nothing(tmp_path):
    def step(program):
        program.kernel(30_000)
        program.operator("aten::randn", 10_000)
        program.python(10_000)

    assert attribute(tmp_path, step).verdict["cause"] == "work"


def test_the_main_thread_explains_a_wait_of_the_engines_thread(tmp_path):
    """The next launch comes from the backward pass, and until it begins the main thread works."""

    def step(program):
        program.kernel(100)
        program.annotation("enumerate(DataLoader)#_Iter.__next__", FAULT)
        program.thread = BACKWARD
        program.kernel(100)
        program.thread = MAIN
        program.kernel(100)

    assert attribute(tmp_path, step).verdict["cause"] == "input"


def test_copies_beside_kernels_are_work(tmp_path):
    def step(program):
        program.kernel(5_000)
        end = program.device
        program.correlation += 1
        program.run("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", end - 4_000, 3_000, stream=9)
        program.device = end

    ms = parts(attribute(tmp_path, step))
    assert ms["work"] == pytest.approx(5, rel=0.01) and "copy_to_device" not in ms


def test_kernels_that_fill_under_half_of_the_gpu_are_a_kind_of_their_own(tmp_path):
    def step(program):
        program.kernel(1_000, blocks=49)
        program.kernel(500, blocks=50)

    ms = {part["kind"]: part["ms"] for part in attribute(tmp_path, step).parts}
    assert ms["small grids"] == pytest.approx(1) and ms["matrix products"] == pytest.approx(0.5)


def test_a_kernel_that_was_launched_and_waits_long_has_no_known_cause(tmp_path):
    def step(program):
        program.kernel(100)
        program.device += 3
        program.kernel(100)
        program.device += 3_000
        program.kernel(100)

    causes = attribute(tmp_path, step)
    assert causes.verdict["cause"] == "unknown"
    ms = {part["kind"] or part["cause"]: part["ms"] for part in causes.parts}
    assert ms["unknown"] == pytest.approx(3, rel=0.01)
    assert ms["between kernels"] == pytest.approx(0.003, rel=0.01)


def test_a_launch_that_is_over_does_not_make_the_gpu_wait(tmp_path):
    """A profiler can hold up a GPU, and an event of another stream can."""

    def step(program):
        for _ in range(10):
            program.kernel(100)
            program.synchronize()
            program.device = program.host + 3_000
        program.kernel(100)
        program.synchronize()

    causes = attribute(tmp_path, step)
    assert causes.verdict["cause"] == "unknown"
    assert parts(causes)["unknown"] == pytest.approx(10 * 2.985, rel=0.01)
    assert parts(causes).get("launches", 0) < 0.2
    assert "had launched" in causes.verdict["sentence"]
    assert "activities" not in causes.verdict["sentence"], "the trace has both"


def test_one_value_of_a_tensor_on_the_cpu_synchronizes_nothing(tmp_path):
    """An optimizer reads the number of its step so."""

    def step(program):
        program.work()
        for _ in range(500):
            program.operator("aten::item", 40)

    causes = attribute(tmp_path, step)
    assert causes.verdict["cause"] == "cpu_operators" and "synchronization" not in parts(causes)


def test_many_small_causes_are_waits_though_none_is_large(tmp_path):
    names = ("input", "allocation", "compilation")

    def step(program):
        for name in names:
            program.kernel(10_000)
            program.synchronize()
            FAULTS[name](program, 2_500)

    causes = attribute(tmp_path, step)
    sentence = causes.verdict["sentence"]
    assert causes.verdict["cause"] == "work" and "no wait" not in sentence
    assert "no cause of waiting takes 10 % alone: " in sentence
    assert all(f"{name} 2.5" in sentence for name in names)


def test_an_allocator_that_waits_before_it_frees_and_tries_again_allocates(tmp_path):
    def step(program):
        program.work()
        program.synchronize("StreamSynchronize")
        program.call("Free", 5_000)
        program.call("Malloc", 5_000)

    causes = attribute(tmp_path, step)
    assert causes.verdict["cause"] == "allocation"
    assert "synchronization" not in parts(causes)


def with_frames(program, us, *names):
    for name in names:
        program.add("python_function", name, program.host, program.host + us)
    program.python(us)


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (["train.py(10): main", "train.py(7): log", "<built-in method sleep of module>"], "host"),
        (["train.py(10): main", "torch/serialization.py(960): save"], "saving"),
        (["train.py(10): main", "torch/_dynamo/convert_frame.py(600): __call__"], "compilation"),
        (["train.py(10): main", "torch/utils/data/dataloader.py(700): __next__"], "input"),
    ],
)
def test_functions_of_python_name_the_line_and_what_it_does(tmp_path, names, cause):
    def step(program):
        with_frames(program, FAULT, *names)
        program.work()

    causes = attribute(tmp_path, step)
    line = "train.py(7): log" if cause == "host" else "train.py(10): main"
    assert causes.verdict["cause"] == cause and line in causes.verdict["sentence"]
    longest = causes.gaps.loc[causes.gaps.duration_ns.idxmax()]
    assert longest.line == line and longest.cause == cause


@pytest.mark.parametrize("cause", FAULTS)
def test_the_waits_of_a_cause_add_up_to_its_part(tmp_path, cause):
    """Also those in which the device copies or communicates, and nothing else."""

    def step(program):
        FAULTS[cause](program, FAULT)
        program.work()

    causes = attribute(tmp_path, step)
    times = causes.gaps.groupby("cause").duration_ns.sum() / STEPS / 1e6
    assert times[cause] == pytest.approx(parts(causes)[cause])


def test_gaps_have_their_place(tmp_path):
    def step(program):
        begin = program.host
        program.item()
        program.call("Malloc", 9_000)
        program.add("user_annotation", "evaluate", begin, program.host)
        program.work()

    gaps = attribute(tmp_path, step).gaps
    assert tuple(gaps.columns[: len(waits.GAP_COLUMNS)]) == waits.GAP_COLUMNS
    longest = gaps.loc[gaps.duration_ns.idxmax()]
    assert (longest.cause, longest.span) == ("allocation", "evaluate")
    assert "cudaMalloc" in longest["where"]
    assert (gaps.start_ns.diff().dropna() >= 0).all()


def test_a_file_without_events_of_the_host_names_no_cause(tmp_path):
    table = {"name": ["gemm"] * 3, "start_ns": [0, 2e6, 4e6], "duration_ns": [1e6] * 3}
    causes = waits.attribute(make_source("rocpd", tmp_path, table))
    assert causes.step_ms == 5 and parts(causes) == {"work": 3, "unknown": 2}
    assert causes.verdict["cause"] == "unknown" and causes.verdict["gain"] == 5 / 3
    table.pop("start_ns")
    table["name"][0] = "ncclDevKernel_AllReduce"
    causes = waits.attribute(make_source("ncu", tmp_path, table))
    assert causes.step_ms == 3 and parts(causes) == {"work": 2, "communication": 1}
    # Communication may have run beside work.
    assert (causes.verdict["cause"], causes.verdict["ms"], causes.verdict["gain"]) == (
        "unknown",
        0,
        1,
    )
    assert "no timeline" in causes.verdict["sentence"]
    assert "matrix products 2 ms (67 %)" in causes.verdict["sentence"]
    assert "communication 1 ms (33 %)" in causes.verdict["sentence"]


def test_a_cpu_has_no_causes(tmp_path, cpu_trace):
    assert waits.attribute(load_kernels.load(cpu_trace)) is None


def test_an_optimizer_on_the_cpu_is_no_checkpoint(tmp_path):
    """It copies gradients to the host, too, but then works in operators, with Python between."""

    def step(program):
        program.work()
        for _ in range(20):
            program.copy(50, "Memcpy DtoH (Device -> Pageable)")
        program.python(500)
        for _ in range(300):
            program.operator("aten::mul_", 15)
            program.python(20)
        program.copy(50)

    causes = attribute(tmp_path, step)
    assert causes.verdict["cause"] == "cpu_operators"
    assert "saving" not in parts(causes)


def test_the_host_has_no_part_in_gaps_between_the_kernels_of_a_graph(tmp_path):
    def step(program):
        program.operator("aten::empty", 1)
        program.correlation += 1
        program.add(
            "cuda_runtime",
            "cudaGraphLaunch",
            program.host,
            program.host + 50,
            correlation=program.correlation,
        )
        start = max(program.device, program.host + 40)
        for _ in range(100):
            program.run("kernel", "gemm", start, 8)
            start = program.device + 2
        program.host = program.device
        program.python(1_000)

    causes = attribute(tmp_path, step)
    ms = {part["kind"] or part["cause"]: part["ms"] for part in causes.parts}
    assert ms["between kernels"] == pytest.approx(0.198, abs=0.02)
    assert ms["host"] == pytest.approx(1 + 0.04, abs=0.02)
    assert causes.verdict["cause"] == "host"
    # One call launches all of them.
    assert causes.verdict["sentence"].endswith("it slows each of 1 launches.")


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("h200/traces/v2_compile_small.json.gz", "launches"),
        ("h200/traces/v3_small.json.gz", "launches"),
        ("h200/traces/v4_small.json.gz", "work"),
        ("h200x2/traces/v4_medium.json.gz", "work"),
        ("h100/v1_medium_profile.json.gz", "work"),
        ("h100/v1_tiny_profile.json.gz", "launches"),
        ("h100/v1_medium_bf16_profile.json.gz", "unknown"),
    ],
)
def test_recorded_steps_have_one_cause_a_moment(name, cause):
    causes = waits.attribute(load_kernels.load(RESULTS / name))
    assert sum(part["ms"] for part in causes.parts) == pytest.approx(causes.step_ms, rel=1e-3)
    assert causes.verdict["cause"] == cause
    assert {part["cause"] for part in causes.parts} <= set(waits.CAUSES)
    assert causes.gaps.duration_ns.sum() <= 1e6 * causes.step_ms * STEPS


def played(folder, play):
    """The causes of a program without marks of steps."""
    program = Program()
    play(program)
    return waits.attribute(load_kernels.load(program.save(folder / "trace.json")))


def test_a_trace_without_steps_is_one_stretch_from_its_first_kernel_to_its_last(tmp_path):
    def play(program):
        program.kernel(1_000)
        program.python(4_000)
        program.kernel(1_000)

    causes = played(tmp_path, play)
    assert causes.step_ms == pytest.approx(5.02, abs=0.01)
    assert causes.verdict["cause"] == "host" and "in the file" in causes.verdict["sentence"]


def test_what_comes_before_the_first_kernel_is_named_where_there_are_no_steps(tmp_path):
    def play(program):
        program.operator("aten::randn", 4_985)
        program.kernel(1_000)

    causes = played(tmp_path, play)
    assert causes.step_ms == 1
    assert causes.verdict["sentence"].endswith(" The 5 ms before the first kernel are not counted.")


def test_a_file_of_copies_alone_has_no_gain(tmp_path):
    verdict = played(tmp_path, lambda program: program.copy(1_000)).verdict
    assert verdict["cause"] == "copy_to_device" and verdict["gain"] == 1
    assert "times as fast" not in verdict["sentence"]


def test_a_file_without_operators_does_not_tell_that_the_host_is_in_none(tmp_path):
    def play(program):
        for _ in range(5):
            program.kernel(100)
            program.python(2_000)
        program.events = [event for event in program.events if event["cat"] != "cpu_op"]

    verdict = played(tmp_path, play).verdict
    assert verdict["cause"] == "host" and "in no operator" not in verdict["sentence"]
    assert "the file has no operators" in verdict["sentence"]


def test_work_of_one_gpu_does_not_tell_that_another_works(tmp_path):
    def play(program):
        for number in range(10):
            program.kernel(1_000)
            program.events[-1]["pid"] = number % 2

    sentence = played(tmp_path, play).verdict["sentence"]
    assert sentence.startswith("At least one of 2 GPUs works for 100 %")
    assert "no wait" not in sentence
    table = {"name": ["gemm"] * 2, "start_ns": [0, 1e6], "duration_ns": [1e6] * 2}
    source = make_source("rocpd", tmp_path, table, gpus=2)
    assert waits.attribute(source).verdict["sentence"].startswith("At least one of 2 GPUs")


def test_a_kernel_whose_launch_is_not_in_the_trace_has_no_known_cause(tmp_path):
    def play(program):
        program.kernel(1_000)
        program.python(4_000)
        program.correlation += 1
        program.run("kernel", "gemm", 5_000, 1_000)

    causes = played(tmp_path, play)
    assert causes.verdict["cause"] == "unknown" and parts(causes)["work"] == pytest.approx(2)


def test_a_gap_is_one_of_all_gpus(tmp_path):
    """While the second works, the host costs nothing."""

    def play(program):
        program.kernel(1_000)
        program.run("kernel", "gemm", 15, 9_000, stream=8)
        program.events[-1]["pid"] = 1
        program.python(4_000)
        program.kernel(1_000)

    assert played(tmp_path, play).verdict["cause"] == "work"

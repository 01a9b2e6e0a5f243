"""Where a profiled step spends its time, what limits each operator, and the most that each optimisation could gain.

Reads one profile and writes into ./bottleneck_analysis/ the report, operator_timing.csv and optimization_targets.json. Times come
from the profile, and ceilings from its run, which measured a GEMM, a copy and a small operation. Each bound follows from the two
as the report explains. The time of an operator is its self time: of its kernels on a GPU, of its own code on a CPU.

Schema of optimization_targets.json, "tiny-llama-targets/1":

    profile, step_us    the file, and its mean profiled step (the attention in it, where only attention was kept)
    targets             largest bound first: name, fused_form, operators (names), calls and fused_calls in a step, time_us,
                        note, and, null where a ceiling is not known, floor_us, share = (time_us - floor_us) / step_us and
                        bound = 1 / (1 - share)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.analysis.formulas import operators
from common.analysis.formulas.operators import OperatorCalls, Work, linear_products
from common.analysis.formulas.peaks import datasheet
from common.analysis.output import tables
from common.analysis.output.report import Report
from common.analysis.reports import profile_summary
from common.errors import UsageError
from common.files import writable_folder, write_text
from common.records import step_profile

SCHEMA = "tiny-llama-targets/1"
FOLDER = Path("bottleneck_analysis")
TOP = 15
PARTS = {
    "attention": "attention", "mlp": "feed-forward", "norm": "norms", "residual": "residuals", "embed": "embedding",
    "loss": "head and loss", "optimizer": "optimizer", "other": "gradient accumulation, other",
}  # fmt: skip
# Attention's operators on [.., S, S]: where S = Dh, RoPE's have that shape too.
ON_SCORES = ("div", "triu", "fill_", "masked_fill", "masked_fill_", "_softmax", "_softmax_backward_data")
ABOUT_PARTS = (
    "These are self times, so they add up. Work of the backward pass counts for the part whose forward pass made it "
    "necessary (gradients that meet at a residual are added in the norm before it). The last row is time that no operator "
    "covers."
)
ABOUT_LAUNCHES = (
    "The GPU gets {:,.0f} launches a step. Each starts {} after its call on average, and the GPU is busy for {:.0f} % of the "
    "step. A delay of a few us means that the GPU waits for the host, one of milliseconds that the host is ahead. The "
    "profiler slows the host, so without it a GPU idles less."
)
ABOUT_OPERATORS = (
    "The lower bound of a call is max(FLOPs / peak, bytes / bandwidth, time of a small operation). The largest of the three "
    "binds it, and `% of ceiling` is how close the call comes. FLOPs and bytes follow from its shapes, with every tensor "
    "moved once. Above 100 %, tensors came from a cache, or a product beat the one that set the ceiling. Launch-bound "
    "operators are too small for either ceiling, or (views, autograd nodes) have no work at all."
)
ABOUT_TARGETS = (
    "t is the time of the operators concerned and of the overhead at their calls: views and autograd nodes of that part, "
    "and the time outside operators, each spread evenly over the calls that do work. f is the floor of the fused form: for "
    "each of its calls max(FLOPs / peak, bytes / bandwidth) and the same overhead, or the time of a small operation if that "
    "is more. With p = (t - f) / step, the step gets at most 1 / (1 - p) times as fast (Amdahl's law): a bound, not a "
    "forecast. Bounds of targets that share operators do not multiply."
)
CSV_COLUMNS = (
    "operator", "span", "phase", "input_shapes", "input_types", "calls_per_step", "us_per_step", "flops_per_call",
    "bytes_per_call", "bound_by", "percent_of_ceiling", "percent_of_step", "flops_per_second", "bytes_per_second",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The mean profiled step; times in us."""

    profile: dict[str, Any]
    rows: list[OperatorCalls]  # largest time first
    us: float
    outside_us: float  # time in which a GPU idles, or a CPU is outside all operators; 0 where only attention was kept

    @property
    def on_gpu(self) -> bool:
        return bool(self.profile["kernels"])

    def overhead(self, span: str) -> float:
        """us of overhead at each working call: an equal share of its span's overhead and of the time outside operators."""
        working = [row for row in self.rows if row.works]
        views = sum(row.us for row in self.rows if not row.works and row.span == span)
        return views / sum(row.calls for row in working if row.span == span) + self.outside_us / sum(row.calls for row in working)


def read_step(path: Path) -> Step:
    """The mean step of a profile.

    Raises:
        UsageError: the file is not a profile, or it is damaged or holds no step.
    """
    profile = step_profile.read(path)
    rows = operators.rows(profile)
    inside = sum(row.us for row in rows)
    if profile["attention_only"]:
        return Step(profile, rows, inside, 0.0)
    wall = sum(profile["step_us"]) / profile["profiled_steps"]
    covered = profile["device_busy_us"] / profile["profiled_steps"] if profile["kernels"] else inside
    return Step(profile, rows, wall, max(0.0, wall - covered))


def targets(step: Step) -> list[dict[str, Any]]:
    """Optimisations that concern operators in this profile, the largest bound first. Letters as in common/config.py."""
    run = step.profile["run"]
    model, training, precision = run["model"], run["training"], run["precision"]["compute"]
    length, tokens = training["sequence_length"], training["batch_size"] * training["sequence_length"]
    hidden, layers, ffn = model["hidden_size"], model["num_layers"], model["intermediate_size"]
    head_dim = hidden // model["num_attention_heads"]
    kv = head_dim * model["num_key_value_heads"]
    element = operators.element_bytes(run)
    vector = element * tokens * hidden  # bytes of a [B, S, D]
    working, found = [row for row in step.rows if row.works], []
    overhead = {span: step.overhead(span) for span in {row.span for row in working}}

    def add(name, form, rows, fused, note="", ceilings=run["ceilings"], part=lambda row: 1.0) -> None:
        """`part` is the fraction of a row's calls and time that the target concerns."""
        if not rows:
            return
        calls = sum(row.calls * part(row) for row in rows)
        beside = sum(row.calls * part(row) * overhead[row.span] for row in rows)
        now, floor = sum(row.us * part(row) for row in rows) + beside, None
        if ceilings:
            least = [max(work.us(ceilings) + beside / calls, ceilings["operation_seconds"] * 1e6) for work in fused]
            floor = min(now, sum(us * work.calls for us, work in zip(least, fused, strict=True)))
        fused_calls = sum(work.calls for work in fused)
        found.append(_target(step, name, form, {row.name for row in rows}, calls, fused_calls, now, floor, note))

    def shapes(row: OperatorCalls) -> list:
        return [shape for shape in json.loads(row.shapes) if shape and isinstance(shape[0], int)]

    def qkv_part(row: OperatorCalls) -> float:  # the output projection has the shape of the Q projection
        (m, k), (_, n) = shapes(row)[:2]
        whole = sorted((m, k, n)) != sorted((tokens, hidden, hidden))
        return 1.0 if whole else 3 / 4 if kv == hidden else 1 / 2

    def quadratic(row: OperatorCalls) -> bool:  # [.., S, S]; the copies of K and V for grouped queries have 5 dimensions
        scores = [length, length] if length != head_dim or row.name.removeprefix("aten::") in ON_SCORES else None
        return row.name == "aten::bmm" or any(shape[-2:] == scores or len(shape) == 5 for shape in shapes(row))

    attention = [row for row in working if row.span == "attention" and row.name != "aten::mm"]
    projections = [row for row in working if row.span == "attention" and row.name == "aten::mm"]
    form = "Q, K and V by one GEMM of width D + 2 K Dh in each layer: one forward, two backward"
    add("QKV fusion", form, projections, linear_products(layers, tokens, hidden, hidden + 2 * kv, element), part=qkv_part)

    form = "gate and up by one GEMM of width 2 F; silu(gate) * up in one pass forward (2 reads, 1 write), one backward (3, 2)"
    fused = [Work(layers, 0, element * tokens * ffn * passes) for passes in (3, 5)]
    fused += linear_products(layers, tokens, hidden, 2 * ffn, element)
    mlp = [row for row in working if row.span == "mlp"]
    add("SwiGLU fusion", form, mlp, fused, part=lambda row: 2 / 3 if row.name == "aten::mm" else 1.0)

    form = "no [S, S] matrix in memory, no later positions; reads Q, K, V, writes O, and again for the gradients"
    pairs = training["batch_size"] * length * (length + 1) // 2
    streams = element * tokens * 2 * (hidden + kv)  # Q, K, V and O
    fused = [Work(layers, 4 * pairs * hidden, streams), Work(layers, 10 * pairs * hidden, 2 * streams)]
    add("flash attention", form, [row for row in attention if quadratic(row)], fused)

    form = "as torch.compile fuses: RoPE of Q and K one pass, each norm with its residual one pass, forward and backward"
    rope, norms = [row for row in attention if not quadratic(row)], [row for row in working if row.span in ("norm", "residual")]
    fused = [Work(2 * layers, 0, streams)] if rope else []
    if norms:  # x -> y, and x, dy -> dx; the residual adds a read and a write, or a read, to all but the first norm
        fused += [Work(1, 0, 2 * vector), Work(1, 0, 3 * vector), Work(4 * layers, 0, 4 * vector)]
    add("elementwise fusion", form, rope + norms, fused)

    form = "AdamW in one kernel: reads weight, gradient and both moments, writes weight and moments, all fp32"
    optimizer = [row for row in working if row.span == "optimizer"]
    add("fused optimizer", form, optimizer, [Work(1, 0, 7 * 4 * run["parameters"])])

    peaks = datasheet(run["device"]["name"])
    if precision == "fp32":
        products = [row for row in working if row.bytes and row.name.removeprefix("aten::") in operators.MATRIX_PRODUCTS]
        fused = [Work(row.calls, row.flops, row.bytes / 2) for row in products]
        note = "Not bounded: the bf16 ceiling of this device is not known; --use-amp --measure-peak measures it."
        if peaks:
            note = f"With the data sheet's bf16 peak, {peaks['bf16'] / 1e12:.0f} TFLOP/s."
        ceilings = run["ceilings"] | {"flops_per_second": peaks["bf16"]} if run["ceilings"] and peaks else None
        add("mixed precision", "the same products in bf16: half the bytes, a higher peak", products, fused, note, ceilings)
    if step.on_gpu and step.outside_us:
        form = "the step replayed as a CUDA or HIP graph: the GPU never waits for the host"
        calls = sum(row.calls for row in working)
        found.append(_target(step, "launch overhead", form, set(), calls, 1, step.outside_us, 0.0, "All idle time."))
    return sorted(found, key=lambda target: -(target["bound"] or 0))


def _target(step: Step, name, form, names, calls, fused_calls, now, floor, note) -> dict[str, Any]:
    share = None if floor is None else (now - floor) / step.us
    return {
        "name": name, "fused_form": form, "operators": sorted(names), "calls": calls, "fused_calls": fused_calls,
        "time_us": now, "floor_us": floor, "share": share, "bound": None if share in (None, 1) else 1 / (1 - share), "note": note,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- report


def breakdown(step: Step) -> list[list[Any]]:
    """Rows of part, us in forward, backward and other, their sum and percent of the step; on a GPU from all kernels."""
    steps, times = step.profile["profiled_steps"], [(row.span, row.phase, row.us) for row in step.rows]
    if step.on_gpu:
        times = [(kernel["span"], kernel["phase"], kernel["device_us"] / steps) for kernel in step.profile["kernels"]]
    body = []
    for span, label in PARTS.items():
        own = [(phase if phase in ("forward", "backward") else "other", us) for part, phase, us in times if part == span]
        columns = [sum(us for phase, us in own if phase == column) for column in ("forward", "backward", "other")]
        body += [[label, *columns, sum(columns), 100 * sum(columns) / step.us]] if own else []
    body.sort(key=lambda row: -row[4])
    label = "GPU idle" if step.on_gpu else "outside operators (Python, dispatch)"
    return body + ([[label, None, None, None, step.outside_us, 100 * step.outside_us / step.us]] if step.outside_us else [])


def report(step: Step, path: Path, ranked: list[dict[str, Any]]) -> Report:
    """Time by part, the longest operators and the targets; it writes operator_timing.csv and optimization_targets.json."""
    result, profile = Report(f"Bottlenecks of tiny_llama_{step.profile['run']['version']}"), step.profile
    part = "attention" if profile["attention_only"] else "the step"
    _add_conditions(result, step, path)
    result.section(f"Time of {part} by part")
    result.text(ABOUT_PARTS)
    unit, factor = tables.time_unit(step.us / 1e3)
    header = ["part", *(f"{name} {unit}" for name in ("forward", "backward", "other", "total")), "% of step"]
    rows = [[row[0], *(us and us / 1e3 * factor for us in row[1:5]), row[5]] for row in breakdown(step)]
    result.table(header, rows)
    if step.on_gpu and not profile["attention_only"]:
        delay = tables.format_time(profile["launch"]["mean_delay_us"] / 1e3)
        busy = 100 - 100 * step.outside_us / step.us
        result.text(ABOUT_LAUNCHES.format(profile["launch"]["count"] / profile["profiled_steps"], delay, busy))
    result.section("The operators that take longest")
    result.text(ABOUT_OPERATORS)
    _add_operators(result, step)
    result.section("Targets of optimisation")
    result.text(ABOUT_TARGETS)
    unit, factor = tables.time_unit(max((target["time_us"] for target in ranked), default=0) / 1e3)
    rows = [
        [target["name"], target["calls"], target["fused_calls"], target["time_us"] / 1e3 * factor,
         target["floor_us"] and target["floor_us"] / 1e3 * factor, target["share"] and 100 * target["share"],
         target["bound"] and f"{target['bound']:.2f}x"]
        for target in ranked
    ]  # fmt: skip
    result.table(["target", "calls", "fused", f"now t {unit}", f"floor f {unit}", "share p %", "gain at most"], rows)
    result.facts([(target["name"], f"{target['fused_form']}. {target['note']}".strip()) for target in ranked])
    result.json("optimization_targets", {"schema": SCHEMA, "profile": str(path), "step_us": step.us, "targets": ranked})
    return result


def _add_conditions(report: Report, step: Step, path: Path) -> None:
    ceilings = step.profile["run"]["ceilings"]
    report.text(
        f"{profile_summary.conditions(step.profile)}.", f"Command `{step.profile['run']['command']}`, profile {path.name}."
    )
    if step.profile["attention_only"]:
        report.text("Only attention was kept: shares are of attention, not of the step.")
    if not ceilings:
        report.text("No measured ceilings, so nothing is classed or bounded: profile again with --measure-peak.")
        return
    report.text(
        f"Measured ceilings: {ceilings['flops_per_second'] / 1e9:,.0f} GFLOP/s ({ceilings['precision']} GEMM), "
        f"{ceilings['bytes_per_second'] / 1e9:,.1f} GB/s (copy), "
        f"{tables.format_time(ceilings['operation_seconds'] * 1e3)} for a small operation."
    )


def _add_operators(report: Report, step: Step) -> None:
    unit, factor = tables.time_unit(step.rows[0].us / 1e3)
    header = ["operator", "span", "phase", "shapes", "calls", unit, "% of step", "bound by", "GFLOP/s", "GB/s", "% of ceiling"]
    rows = [
        [row.name.removeprefix("aten::"), row.span, row.phase, row.shapes.replace(", []", ""), row.calls, row.us / 1e3 * factor,
         100 * row.us / step.us, row.bound, row.rate(row.flops, 1e9), row.rate(row.bytes, 1e9), row.percent]
        for row in step.rows[:TOP]
    ]  # fmt: skip
    report.table(header, rows, least=["GFLOP/s", "GB/s", "phase"])
    timing = ([*row, 100 * row.us / step.us, row.rate(row.flops), row.rate(row.bytes)] for row in step.rows)
    report.csv("operator_timing", CSV_COLUMNS, timing)


def analyze(profile_data: Path, output_report: Path, version: str) -> str:
    """Writes report, operator_timing.csv and optimization_targets.json; returns the text for a terminal.

    Args:
        profile_data: a profile, or a folder whose newest profile is taken.
        output_report: a bare name goes into ./bottleneck_analysis/.
        version: the version whose parts the targets are.

    Raises:
        UsageError: there is no such profile, it is of another version, or a folder cannot be written to.
    """
    path = step_profile.find(profile_data)
    step = read_step(path)
    if (found := step.profile["run"]["version"]) != version:
        raise UsageError(f"{path} is of {found}: the targets are parts of {version}, which others fuse")
    result = report(step, path, targets(step))
    if output_report.parent == Path("."):
        output_report = FOLDER / output_report
    for folder in (output_report.parent, FOLDER):
        writable_folder(folder, "--output-report")
    write_text(output_report, result.markdown())
    written = [output_report, *result.write(FOLDER, "", ("csv", "json"), "--output-report")]
    return f"{result.terminal()}\n\nwritten: {', '.join(map(str, written))}"

"""A small valid file of each schema that the repository reads, and what is done with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from common import config
from common.analysis.comparisons import ablation_effects, compare, growth, predictions
from common.analysis.output.report import Report
from common.analysis.profiles import chrome_trace, communication
from common.analysis.reports import (
    bandwidth,
    bottlenecks,
    critical_path,
    flop_counts,
    kernel_benchmark,
    launches,
    memory_timeline,
    profile_summary,
    roofline,
    triton_kernels,
)  # fmt: skip
from common.documents.sections import section
from common.files import read, read_json, write_json
from common.records import lab_file, step_profile, study_files
from common.studies import batch_size, benchmark_report, gemm_operations, scaling
from tests import records
from tests.conftest import ROOT
from tests.kernel_files import FIXTURES, STATS, write_counters, write_database
from tests.records import profile, record
from tests.small_traces import CEILINGS, gpu_trace, rank_trace

import compare_stages

KINDS = ("md", "csv", "json")


RESULTS = ROOT / "results"


class Valid(NamedTuple):
    """A file, by the name of its schema. `use` reads what `write` wrote to this path and makes every report of it."""

    name: str
    write: Callable[[Path], object]
    use: Callable[[Path], object]


def published(report: Report, path: Path) -> None:
    report.publish(path.parent / "report", "report", KINDS)


def first_rows(path: Path) -> Any:
    """A result file with two rows of each list."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items()}
        return [short(each) for each in value[:2]] if isinstance(value, list) else value

    return short(read_json(path))


# ------------------------------------------------------------------------------------------------------ runs and profiles


def write_run(path: Path) -> None:
    ran = record(ceilings=CEILINGS, mfu={"utilization": 0.5, "peak_flops_per_second": 1e12, "peak_source": "data sheet"})
    write_json(path, ran | {"settings": {"flash_attention": True}})


def use_run(path: Path) -> None:
    other = path.with_name("metrics_other.json")
    write_run(other)
    verdict = compare.regression(other, path, 0.9, 1.0)
    published(verdict.report, path)


def use_run_of_a_version(path: Path) -> None:
    folders = []
    for name in ("v1", "v2"):
        folder = path.parent / name
        folder.mkdir(exist_ok=True)
        (folder / f"tiny_llama_{name}.py").write_text("")
        write_json(folder / "metrics.json", record(version=name))
        folders.append(folder)
    shutil.copy(path, folders[0] / "metrics_1.json")
    published(compare.versions(*folders), path)


OPERATORS = [
    {"name": "aten::mm", "input_shapes": "[[4, 8], [8, 8]]", "input_types": '["float", "float"]', "self_device_us": 9.0},
    {"name": "aten::_foreach_add_", "span": "optimizer", "phase": "optimizer"},
]


def write_profile(path: Path) -> None:
    run = record(ceilings=CEILINGS, settings={"flash_attention": True}, version="v1")
    kernels = [{"name": "gemm", "phase": "forward"}, {"name": "_rope_kernel", "span": "optimizer"}]
    write_json(path, profile(run, OPERATORS, kernels, memory_peak_bytes=2**30))


def use_profile(path: Path) -> None:
    content = step_profile.read(path)
    other = path.with_name("other.json")
    write_json(other, profile(record(ceilings=CEILINGS), OPERATORS, [{"name": "gemm"}]))
    published(profile_summary.report([path]), path)
    if content["run"]["ceilings"]:
        published(roofline.report(roofline.from_profile(content), content["run"]["ceilings"], "some run"), path)
    published(
        triton_kernels.report(path, content, {("gemm", "forward"): SimpleNamespace(operation="mm", bytes=100, flops=100)}), path
    )
    published(compare.kernel_reduction(path, other, 5), path)
    bandwidth.analyze(path, path.parent / "report", False)
    launches.analyze(path, 5, path.parent / "launches.csv")
    step = bottlenecks.read_step(path)
    published(bottlenecks.report(step, path, bottlenecks.targets(step), "b"), path)


def use_profiles_of_sizes(path: Path) -> None:
    own = {"ceilings": CEILINGS, "settings": {"flash_attention": True}}
    runs = {number: record(**own, training__batch_size=number) for number in (2, 3, 4)}
    published(growth.batch_scaling(with_others(path, runs)), path)


def use_profiles_of_lengths(path: Path) -> None:
    runs = {}
    for number in (64, 256):
        model = record()["model"] | {"max_sequence_length": number}
        own = {"settings": {"flash_attention": True}, "training__sequence_length": number, "model": model}
        runs[number] = record(ceilings=CEILINGS, **own)
    published(growth.sequence_memory(with_others(path, runs)), path)


def with_others(path: Path, runs: dict[int, dict]) -> list[Path]:
    """Folders of a copy of the profile and of a profile of each run."""
    first = path.parent / "first"
    first.mkdir(exist_ok=True)
    shutil.copy(path, first / "profile_1.json")
    others = []
    for number, run in runs.items():
        folder = path.parent / f"run{number}"
        folder.mkdir(exist_ok=True)
        write_json(folder / "profile_1.json", profile(run, OPERATORS, [{"name": "gemm"}], memory_peak_bytes=2**30 * number))
        others.append(folder)
    return [first, *others]


def write_flops(path: Path) -> None:
    counted = {"DeepSpeed": {"forward": 10, "backward": 20}}
    written = flop_counts.write(path.parent, counted, record(ceilings=CEILINGS))
    shutil.move(written[0], path)
    write_profile(path.with_name("profile_1.json"))
    flop_counts.add_work(path, path.with_name("profile_1.json"))


def use_flops(path: Path) -> None:
    counts = flop_counts.read(path)
    published(flop_counts.report(counts), path)
    if "work" in counts and counts["run"]["ceilings"]:
        published(flop_counts.intensity(counts), path)


# ----------------------------------------------------------------------------------------------------------- traces


def write_trace(path: Path) -> None:
    content = gpu_trace()
    memory = {"Bytes": 1024, "Addr": 1, "Total Allocated": 4096, "Device Type": 1}
    event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 7, "tid": 1, "ts": 1013.0, "args": memory}
    events = [each for each in content["traceEvents"] if each["args"].get("correlation") in (None, 1, 5)]
    kept = [each for each in events if "backward" not in each["name"]]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*kept, event]}))


def use_trace(path: Path) -> None:
    trace = chrome_trace.load(path)
    shown = profile(record(ceilings=CEILINGS), OPERATORS, [{"name": "gemm"}]) | chrome_trace.profile_tables(trace)
    if len(trace.memory):
        published(memory_timeline.report(trace, shown), path)
    own = path.with_name("profile_of_trace.json")
    write_json(own, shown | {"trace": path.name})
    published(critical_path.report(own, shown | {"trace": path.name}, {}), path)
    step_profile.read(own)


def use_kernels(path: Path) -> None:
    launches.analyze(path, 5, path.parent / "launches.csv")
    other = path.with_name(f"other{path.suffix}")
    if not other.exists():
        shutil.copy(path, other)
    published(compare.kernel_reduction(path, other, 5), path)


def write_pmc(path: Path) -> None:
    names = ("RDREQ_sum", "RDREQ_32B_sum", "WRREQ_sum", "WRREQ_64B_sum")
    counters = [f"TCC_EA_{name}" for name in names]
    rows = [["Dispatch_ID", "GPU_ID", "Kernel_Name", "Start_Timestamp", "End_Timestamp", *counters]]
    rows += [["0", "4", "gemm", "10", "2000", "90", "5", "7", "3"], ["1", "4", "copy", "3000", "4000", "90", "5", "7", "3"]]
    path.write_text("\n".join(map(",".join, rows)) + "\n")


def use_counters(path: Path) -> None:
    bandwidth.analyze(path, path.parent / "report", False)


def use_pmc(path: Path) -> None:
    use_counters(path)
    use_kernels(path)


def write_ceilings(path: Path) -> None:
    path.write_text("device,HBMBw,HBMBwLow,FP32Flops,MFMABF16Flops\n0,1300.5,1200,20000,150000\n")
    write_pmc(path.with_name("pmc_perf.csv"))


def write_launches(path: Path) -> None:
    path.unlink(missing_ok=True)
    write_database(path)


def copied(source: Path) -> Callable[[Path], object]:
    return lambda path: shutil.copyfile(source, path)


# ------------------------------------------------------------------------------------------------------------- studies


def write_batch_search(path: Path) -> None:
    times = {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 9}
    trial = {"batch_size": 1, "status": "ok", "step_ms": times, "tokens_per_second": 9.0, "peak_mib": 9.0}
    out = {"batch_size": 2, "status": "out of memory", "step_ms": None, "tokens_per_second": None, "peak_mib": None}
    found = {"ended": "memory ran out", "batch_size": 1, "reason": "the largest"}
    write_json(path, records.batch_search([trial, out], found))


def write_gemms(path: Path) -> None:
    write_json(path, records.gemms(config.ModelConfig(), [(2, 8)]))


def shortened(name: str) -> Callable[[Path], object]:
    return lambda path: write_json(path, first_rows(RESULTS / name))


def use_lab(path: Path) -> None:
    read(path, lab_file.Lab)


def write_kernel_benchmark(path: Path) -> None:
    content = read_json(RESULTS / "h100/kernels_loss.json")
    row = content["rows"][0]
    shape = [key for key in row if key in ("operation", "batch_size", "sequence_length", "hidden_size")]
    write_json(path, content | {"rows": [each for each in content["rows"] if all(each[key] == row[key] for key in shape)]})


def use_kernel_benchmark(path: Path) -> None:
    published(kernel_benchmark.report(study_files.read_kernels(path)), path)
    section("rates", [path])


def use_benchmark(path: Path) -> None:
    published(benchmark_report.analyze(path), path)
    section("throughput", [path])


def use_scaling(path: Path) -> None:
    published(scaling.analyze(path), path)
    section("weak", [path])


def use_traces_of_ranks(path: Path) -> None:
    other = path.with_name("trace_rank1_3.json")
    other.write_text(json.dumps(rank_trace(1)))
    ranks = [communication.load(each) for each in (path, other)]
    communication.split(ranks)


def write_stages(path: Path) -> None:
    run = record(device__kind="cpu", phases_ms={"forward": {"median": 4.0, "p20": 3.0, "p80": 5.0, "count": 9}})
    write_json(path.with_name("stage0_metrics.json"), run)
    stage = {"parameters": 9, "updated": 9, "state_mib": 1.0, "caveat": None, "fixed": False}
    slow = {"all": [24.0] * 20, "profiled": 0, "median": 24.0, "p20": 23.0, "p80": 25.0, "count": 20}
    write_json(path.with_name("stage5_metrics.json"), run | {"stage": stage, "version": "v3_stage5_optimized"})
    write_json(path.with_name("stage1_metrics.json"), run | {"stage": stage, "version": "v3_stage1_slow", "step_ms": slow})
    for number in (1, 5):
        table = f"name,category,calls,total_ns,mean_ns,min_ns,max_ns,share\ngemm,kernel,9,9,1,1,1,0.{number}\n"
        path.with_name(f"stage{number}_profile.csv").write_text(table)


def write_predictions(path: Path) -> None:
    row = {"profile": "p", "profiled": record()["date"], "change": "flash-attention", "expected": 1.3}
    write_json(path, {"schema": "tiny-llama-predictions/1", "predictions": [row | {"bound": 1.5}]})


def use_predictions(path: Path) -> None:
    before, after = path.with_name("profile_before.json"), path.with_name("profile_after.json")
    for each in (before, after):
        write_json(each, profile(record(ceilings=CEILINGS), OPERATORS, [{"name": "gemm"}]))
    published(predictions.check(before, after, None, path), path)


CONFIG = {"model": {"hidden_size": 64, "num_layers": 2}, "training": {"learning_rate": 1e-3, "seed": 1}}
VALID = [
    Valid("metrics.json", write_run, use_run),
    Valid("metrics_of_v1.json", write_run, use_run_of_a_version),
    Valid("profile_1.json", write_profile, use_profile),
    Valid("profile_of_a_size.json", write_profile, use_profiles_of_sizes),
    Valid("profile_of_a_length.json", write_profile, use_profiles_of_lengths),
    Valid("flops_profile.json", write_flops, use_flops),
    Valid("trace_1.json", write_trace, use_trace),
    Valid("trace_2.json", write_trace, use_kernels),
    Valid("trace_3.json", lambda path: path.write_text(json.dumps(rank_trace(0))), use_traces_of_ranks),
    Valid("a_kernel_trace.csv", copied(FIXTURES / "new_kernel_trace.csv"), use_kernels),
    Valid("a_kernel_stats.csv", lambda path: path.write_text(STATS), use_kernels),
    Valid("a_results.db", write_launches, use_kernels),
    Valid("pmc_perf.csv", write_pmc, use_pmc),
    Valid("pmc_perf_long.csv", copied(FIXTURES / "pmc_perf_long.csv"), use_kernels),
    Valid("pmc_perf_0.db", lambda path: write_counters(path, {"SQ_WAVES": [16, 0, 32]}), use_kernels),
    Valid("roofline.csv", write_ceilings, lambda path: use_counters(path.with_name("pmc_perf.csv"))),
    Valid("ncu_details.csv", copied(FIXTURES / "ncu_details.csv"), use_kernels),
    Valid("ncu_raw.csv", copied(FIXTURES / "ncu_raw.csv"), use_pmc),
    Valid("batch_search.json", write_batch_search, lambda path: published(batch_size.analyze(path), path)),
    Valid("gemm_analysis.json", write_gemms, lambda path: published(gemm_operations.analyze(path), path)),
    Valid(
        "fusion_ablation.json",
        shortened("h100/v2_ablation_tiny_fp32.json"),
        lambda path: published(ablation_effects.analyze(path), path),
    ),
    Valid("benchmark.json", copied(RESULTS / "cpu/benchmark_tiny_fp32.json"), use_benchmark),
    Valid("scaling.json", lambda path: write_json(path, records.scaling()), use_scaling),
    Valid("profiling_lab.json", shortened("h100/profiling_lab.json"), use_lab),
    Valid("sequence_memory.json", copied(RESULTS / "cpu/sequence_memory.json"), growth.load),
    Valid("metrics_kernels.json", write_kernel_benchmark, use_kernel_benchmark),
    *(
        Valid(name, write_stages, lambda path: published(compare_stages.report(compare_stages.read(path.parent)), path))
        for name in ("stage0_metrics.json", "stage1_metrics.json", "stage1_profile.csv")
    ),
    Valid("predictions.json", write_predictions, use_predictions),
    Valid("config.yaml", lambda path: path.write_text(json.dumps(CONFIG)), lambda path: config.resolve(file=path)),
]

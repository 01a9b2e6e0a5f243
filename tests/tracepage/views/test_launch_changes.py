"""Kernel reduction: what was taken out of a profile is what is found to be gone, sums agree, and
only like is compared.
"""

import copy
import csv
import json

from tests.conftest import ROOT, TINY, V1
from tests.kernel_files import FIXTURES
from tests.small_traces import gpu_trace, write_profile
from tracepage.errors import UsageError
from tracepage.files import write_json
from tracepage.readers import load_kernels
from tracepage.readers.kernel_names import short_name
from tracepage.records import step_profile
from tracepage.views.launch_changes import TOTALS, UNKNOWN, compare_launches

import pytest

V2 = ROOT / "version2_pytorch_fused"
SCRIPT = V2 / "analyze_kernel_reduction.py"
H100 = ROOT / "results" / "h100" / "v1_tiny_profile.json.gz"
FMHA = "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80>::Params)"


def compare(before, after):
    return compare_launches(load_kernels.load(before), load_kernels.load(after))


def calls(found, label="name"):
    rows = found.by(label)
    return dict(
        zip(rows[label], zip(rows.calls_before, rows.calls_after, strict=True), strict=True)
    )


@pytest.fixture(scope="module")
def h100():
    return step_profile.read(H100)


@pytest.fixture
def fused(h100, tmp_path):
    """Version 1 on an H100, with a fused attention kernel (4 a step, 10 us each) in place of its
    softmax and masks.
    """
    profile = copy.deepcopy(h100)
    profile["run"]["version"] = "v2"
    masks = (
        "masked_fill_kernel",
        "softmax_warp_forward<float, float, float, 7",
        "softmax_warp_backward<float, float, float, 7",
    )
    profile["kernels"] = [
        row for row in profile["kernels"] if not any(part in row["name"] for part in masks)
    ]
    steps = profile["profiled_steps"]
    added = {
        "name": FMHA,
        "span": "attention",
        "phase": "forward",
        "calls": 4 * steps,
        "device_us": 40.0 * steps,
    }
    profile["kernels"].append(added)
    write_json(tmp_path / "profile_fused.json", profile)
    return tmp_path / "profile_fused.json"


def test_a_removed_kernel_is_gone_an_added_one_new_kinds_and_spans_say_where(fused):
    found = compare(H100, fused)
    names = found.by("name", "kind")
    changed = {
        short_name(row.name): (row.change, row.kind, row.calls_after - row.calls_before)
        for row in names[names.change != "same"].itertuples()
    }
    masks = next(name for name in changed if "masked_fill" in name)
    assert changed == {
        masks: ("gone", "elementwise", -8),  # forward and backward of 4 layers
        "softmax_warp_forward<false>": ("gone", "reductions", -4),
        "softmax_warp_backward<false>": ("gone", "reductions", -4),
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80": ("new", "attention", 4),
    }
    assert short_name(names.name.iloc[0]) == masks, "the largest change in calls comes first"
    assert list(names.us_after[names.name == FMHA]) == [pytest.approx(40)]
    assert f"{found.counted} {found.extent}" == "kernels per step" and list(
        found.launches[["calls_before", "calls_after"]].sum()
    ) == [569, 557]
    for rows in (found.by("span"), found.by("kind"), names):
        assert rows.us_after.sum() == pytest.approx(found.launches.us_after.sum())
    assert {
        span: after - before
        for span, (before, after) in calls(found, "span").items()
        if after != before
    } == {"attention": -12}


def test_on_a_cpu_operator_calls_that_work_are_counted(tmp_path, cpu_trace):
    profile = write_profile(tmp_path / "profile_before.json", cpu_trace)
    profile["operators"] = [row for row in profile["operators"] if row["name"] != "aten::bmm"]
    write_json(tmp_path / "profile_after.json", profile)
    found = compare(tmp_path / "profile_before.json", tmp_path / "profile_after.json")
    counted = calls(found)
    # 2 layers: q k^T and its product with v, and two gradients of each
    assert found.counted == "operator calls" and counted["aten::bmm"] == (12, 0)
    assert all(
        before == after
        for span, (before, after) in calls(found, "span").items()
        if span != "attention"
    )
    assert not {"aten::view", "aten::empty", "autograd engine"} & set(counted)


@pytest.mark.slow
def test_versions_are_compared_as_documented(run_script, tmp_path):
    for folder, where in ((V1, "before"), (V2, "after")):
        run_script(
            folder / "run_pytorch_profiler.py",
            *TINY,
            "--num-steps",
            3,
            "--profile-dir",
            where,
            "--generate-report",
        )
        assert (tmp_path / where / "report.md").read_text().startswith("# Profiles\n\n## profile_")
    found = compare(tmp_path / "before", tmp_path / "after")
    # A layer has the linear layers q, k, v, o, gate, up and down, or qkv, o, gate-up and down; each
    # is three products (forward, gradients of input and weight), and so is the head.
    assert calls(found)["aten::mm"] == (2 * 7 * 3 + 3, 2 * 4 * 3 + 3)
    assert calls(found, "kind")["attention"] == (0, 2 * 2)


def test_traces_without_profiles_are_compared_by_span_and_name(tmp_path):
    before, after = gpu_trace(), gpu_trace("hipLaunchKernel")
    after["traceEvents"] = [each for each in after["traceEvents"] if each["name"] != "add"]
    for name, trace in (("before", before), ("after", after)):
        (tmp_path / f"trace_{name}.json").write_text(json.dumps(trace))
    found = compare(tmp_path / "trace_before.json", tmp_path / "trace_after.json")
    assert calls(found, "span")["residual"] == (0.5, 0) and UNKNOWN in found.notes
    assert calls(found) == {
        "gemm": (1.5, 1.5),
        "add": (0.5, 0),
        "Memset (Device)": (0.5, 0.5),
        "foreach": (0.5, 0.5),
    }


def test_sources_without_steps_give_totals_and_say_so(tmp_path):
    stats = '"Name","Calls","TotalDurationNs"\n"void scale<float>(float*, float, int)",1,5000\n'
    (tmp_path / "out_kernel_stats.csv").write_text(stats)
    found = compare(FIXTURES / "new_kernel_trace.csv", tmp_path / "out_kernel_stats.csv")
    assert (
        f"{found.counted} {found.extent}" == "kernels in the whole file" and TOTALS in found.notes
    )
    assert calls(found) == {
        "void scale<float>(float*, float, int)": (2, 1),
        "__amd_rocclr_copyBuffer": (1, 0),
    }


def test_what_cannot_be_compared_is_refused(refused, tmp_path, h100, cpu_trace):
    device = h100["run"]["device"] | {"name": "AMD Instinct MI300X"}
    write_json(tmp_path / "device.json", h100 | {"run": h100["run"] | {"device": device}})
    write_json(tmp_path / "attention.json", h100 | {"attention_only": True})
    write_profile(tmp_path / "cpu.json", cpu_trace)
    differ = "differ in more than the version: .*"
    for before, after, message in (
        (
            H100,
            tmp_path / "device.json",
            rf"{differ}device name \(NVIDIA H100.* and AMD Instinct MI300X\)",
        ),
        (H100, tmp_path / "attention.json", rf"{differ}attention only \(False and True\)"),
        (
            tmp_path / "cpu.json",
            H100,
            "counts operator calls and .* kernels: profile both on the same device",
        ),
        (H100, H100, "was given twice"),
        (
            H100,
            FIXTURES / "new_kernel_trace.csv",
            "only one of the two counts per step, .*new_kernel_trace.csv does not",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            compare(before, after)
    assert "nowhere does not exist" in refused(SCRIPT, "--baseline", "nowhere", "--fused", H100)


def test_the_csv_has_all_names_in_full(execute, tmp_path, fused):
    execute(SCRIPT, "--baseline", H100, "--fused", fused, "--top", 2)
    with (tmp_path / "kernel_reduction/kernel_reduction.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(
        float(row["calls_after"]) - float(row["calls_before"]) for row in rows
    ) == pytest.approx(-12)
    assert any(row["name"] == FMHA for row in rows)

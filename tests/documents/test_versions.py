"""Versions and peers beside each other, and losses from the same seed: numbers worked out by hand."""

import gzip
import json
from pathlib import Path

from documents import versions
from tests import records
from tests.conftest import cells
from tests.small_traces import gpu_trace
from tracepage.errors import UsageError
from tracepage.files import write_json

import pytest


def suite(path: Path, spread: tuple[float, ...] = (1.0, 0.0, -0.5), **models: float | str) -> None:
    """A benchmark of one shape: by model its ms per step, around which its processes spread, or why
    there are none.
    """
    entries = []
    for model, outcome in models.items():
        times = [outcome + extra for extra in spread] if isinstance(outcome, float) else []
        memory = {"peak_mib": 9.0, "reserved_mib": 512.0, "kind": "GPU allocator"}
        runs = [
            {"step_ms": {"median": ms, "p20": ms, "p80": ms, "count": 2}} | memory for ms in times
        ]
        place = {"model": model.replace("_", "-"), "batch_size": 8, "sequence_length": 128}
        entries.append(place | {"status": "ok" if times else outcome, "reason": None, "runs": runs})
    write_json(path, records.benchmark(entries))


@pytest.fixture
def cases(tmp_path) -> list[Path]:
    """Two presets in bf16 and one in fp32. At tiny Version 1 waits for its host, and at small it did
    not fit.
    """
    paths = []
    for case in ("tiny_fp32", "tiny_bf16", "small_bf16"):
        paths.append(tmp_path / f"versions_{case}.json")
    tiny = {"v1": 9.0, "v1_captured": 4.0, "v4": 2.0, "captured_bf16": 3.0, "v4_fp8": 1.0}
    suite(paths[0], v2=3.0)
    suite(paths[1], **tiny, v2_captured=3.0)
    suite(paths[2], v1="out of memory", v2=6.0, v4=4.0, liger="failed", hf_compile_captured=3.5)
    for path in paths[:1]:
        study = json.loads(path.read_text())
        write_json(path, study | {"precision": {"compute": "fp32"}})
    for path in paths[1:]:
        study = json.loads(path.read_text())
        write_json(path, study | {"precision": {"compute": "bf16"}})
    return paths


def test_versions_are_held_against_the_fastest_form_of_the_first_that_fits(cases):
    assert cells(versions.versions(*cases[1:])) == [
        ["model", "tiny, bf16, 8 x 128 (n = 3)", "small, bf16, 8 x 128 (n = 3)"],
        ["v1", "9 (8.5 to 10), 0.444x, 0.50", ""],
        ["v1-captured", "4 (3.5 to 5), 1x, 0.50", ""],
        ["v2", "", "6 (5.5 to 7), 1x, 0.50"],
        ["v2-captured", "3 (2.5 to 4), 1.33x, 0.50", ""],
        ["v4", "2 (1.5 to 3), 2x, 0.50", "4 (3.5 to 5), 1.5x, 0.50"],
    ]
    tiny = versions.read_cases(cases[1:2])[0]
    assert tiny.ratio("v1-captured", "v4") == pytest.approx((2, 3.5 / 3, 5 / 1.5))


@pytest.mark.parametrize("captured, reference", [(8.9, "v1-captured"), (9.1, "v1")])
def test_the_reference_is_captured_where_its_step_waits_for_the_host(captured, reference, tmp_path):
    """For more than a tenth of it."""
    path = tmp_path / "versions_tiny_bf16.json"
    suite(path, (0.0,), v1=10.0, v1_captured=captured)
    assert versions.read_cases([path])[0].reference() == reference


def test_models_beside_the_versions(cases):
    header, *found = cells(versions.peers(*cases))
    assert [head.partition(" (")[0] for head in header] == [
        "model",
        "tiny, fp32, 8 x 128",
        "tiny, bf16, 8 x 128",
        "small, bf16, 8 x 128",
    ]
    assert [row[0] for row in found] == [
        "v4-fp8",
        "captured-bf16",
        "hf-compile-captured",
        "liger",
    ]
    assert found[0] == ["v4-fp8", "", "1 (0.5 to 2), 4x, 0.50", ""]
    assert found[-1] == ["liger", "", "", ""]


def test_one_process_is_not_shown_as_agreement(tmp_path):
    """A range that cannot be seen is not shown either."""
    path = tmp_path / "versions_tiny_bf16.json"
    suite(path, (0.001, 0.0), v1=20.0, v4=0.1, v2=5.0)
    study = json.loads(path.read_text())
    del study["cells"][-1]["runs"][1:]
    write_json(path, study)
    header, *found = cells(versions.versions(path))
    assert header[1] == "tiny, fp32, 8 x 128 (n = 2)"
    assert [row[1] for row in found] == [
        "20, 1x, 0.50",
        "5 (n = 1), 4x, 0.50",
        "0.101 (0.1 to 0.101), 199x, 0.50",
    ]


def test_a_ratio_is_of_one_mode_and_a_table_of_one_study_a_case(cases, tmp_path):
    mixed = tmp_path / "versions_medium_bf16.json"
    suite(mixed, v1=9.0, v1_deterministic=10.0)
    with pytest.raises(UsageError, match="v1 and v1-deterministic are of different modes"):
        versions.versions(mixed)
    again = tmp_path / "peers_small_bf16.json"
    again.write_bytes(cases[2].read_bytes())
    with pytest.raises(UsageError, match="second benchmark of small, bf16, 8 x 128"):
        versions.versions(*cases, again)
    study = json.loads(again.read_text())
    study["cells"][0]["batch_size"] = 4
    write_json(again, study)
    with pytest.raises(UsageError, match="has several shapes"):
        versions.versions(again)


@pytest.mark.parametrize("change", [{"device": "name"}, {"environment": "torch"}])
def test_a_table_is_of_one_device_and_one_pytorch(change, cases):
    study = json.loads(cases[2].read_text())
    [(part, key)] = change.items()
    study[part][key] = "another"
    write_json(cases[2], study)
    with pytest.raises(UsageError, match="small_bf16.json is of another device or PyTorch"):
        versions.versions(*cases)


def test_the_price_of_determinism_is_a_ratio_within_one_study(tmp_path):
    path = tmp_path / "determinism_small_bf16.json"
    models = {"v1": 8.0, "v1_deterministic": 10.0, "v4": 2.0, "v2_captured": 4.0}
    suite(path, (1.0, 0.0, -0.5), **models, v2_captured_deterministic=4.0)
    header, *rows = cells(versions.determinism(path))
    assert header == ["size", "n", "model", "ms", "deterministic, ms", "price, %"]
    assert rows == [
        ["small", "3", "v1", "8 (7.5 to 9)", "10 (9.5 to 11)", "25"],
        ["small", "3", "v2-captured", "4 (3.5 to 5)", "4 (3.5 to 5)", "0"],
    ]


def test_levers_begin_with_the_slowest_step(tmp_path):
    paths = [tmp_path / f"levers_{preset}_bf16.json" for preset in ("tiny", "small")]
    suite(paths[0], v4=2.0, v4_no_memory_plan=3.0)
    suite(paths[1], v4=9.0, v4_no_memory_plan=9.5)
    assert cells(versions.levers(*paths)) == [
        ["model", "tiny, ms (n = 3)", "small, ms (n = 3)"],
        ["v4-no-memory-plan", "3 (2.5 to 4)", "9.5 (9 to 10.5)"],
        ["v4", "2 (1.5 to 3)", "9 (8.5 to 10)"],
    ]


def test_a_table_says_what_a_launch_costs_its_host(tmp_path):
    path = tmp_path / "versions_tiny_bf16.json"
    suite(path, v1=8.0)
    study = json.loads(path.read_text())
    for launch, run in zip((5.0, 6.0, 9.0), study["cells"][0]["runs"], strict=True):
        run["host_us"] = {"launch": launch, "mm": 2 * launch}
    write_json(path, study)
    assert "; host, median of all runs: 6 us a launch, 12 us an mm; " in versions.versions(path)


def test_limits_have_the_step_with_and_without_launches_of_two_versions(cases, tmp_path):
    """The version of the folder and the one before. Version 1 at tiny: 9 ms with a launch for each
    of its 5 kernels, 4 ms captured.
    """
    (tmp_path / "traces").mkdir()
    trace = gzip.compress(json.dumps(gpu_trace()).encode())
    (tmp_path / "traces/v1_tiny.json.gz").write_bytes(trace)
    header, *rows = cells(versions.limits(*cases, Path("version4_last")))
    assert header == [
        "size",
        "n",
        "model",
        "kernels",
        "step, ms",
        "captured, ms",
        "waits for the host, %",
    ]
    assert rows[0] == ["tiny", "3", "v4", "", "", "2", ""]
    assert cells(versions.limits(*cases, Path("version3_before")))[1:] == [
        ["tiny", "3", "v1", "5", "9", "4", "55.6"]
    ]


def test_kinds_have_their_shares_in_the_time_of_a_step_s_kernels(tmp_path):
    path = tmp_path / "peer_hf_tiny.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_trace()).encode()))
    header, row = cells(versions.kinds(path))
    shares = ["matrix products %", "other %", "copies %"]
    assert header == ["trace", "kernels", "ms of all", "attention by", *shares]
    # 60, 35 and 10 us
    assert row == ["peer, hf, tiny", "5", "0.105", "math", "57.1", "33.3", "9.52"]


@pytest.mark.parametrize(
    "kernels, backend",
    [
        (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"], "cuDNN"),
        (["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64> >(int)"], "flash"),
        (["fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)"], "memory-efficient"),
        (["_flash_attention_forward", "_short_attention_backward"], "Triton"),
        (["cudnn_sdpa_fprop", "_short_attention_backward", "gemm"], "cuDNN, Triton"),
        (["gemm", "softmax_warp_forward"], "math"),
        (["my_attention_kernel"], "unknown"),
    ],
)
def test_the_backend_of_attention_is_told_by_the_names_of_its_kernels(kernels, backend):
    assert versions.backend(kernels) == backend


def test_curves_show_how_far_the_others_have_come(tmp_path):
    expected = [5.0 - 0.01 * i for i in range(40)]
    apart = {"v1": {}, "v2": {7: 1e-3}, "v3": {20: -0.25}}
    paths = []
    for version, differences in apart.items():
        losses = [loss + differences.get(i, 0) for i, loss in enumerate(expected)]
        paths.append(tmp_path / f"curve_{version}.json")
        write_json(paths[-1], records.record(version=version, loss={"uniform": 6.9, "all": losses}))
    header, *rows = cells(versions.curves(*paths))
    assert header == ["largest difference to Version 1 up to step", "Version 2", "Version 3"]
    assert rows == [
        [step, "1.0e-03", "0.0e+00" if step in ("8", "16") else "2.5e-01"]
        for step in ("8", "16", "24", "32", "40")
    ]

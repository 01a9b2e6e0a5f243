"""Tables of a small benchmark of kernels."""

from tests.conftest import cells
from tests.records import record
from tracepage.files import schema_of, write_json
from tracepage.records import study_files
from tracepage.show import tables
from tracepage.views import kernel_benchmark


def row(
    operation: str,
    contender: str,
    host: float,
    gpu: float | None,
    amount: int = 10**9,
    **shape: int,
) -> dict:
    """A row of a measurement, at B 4, S 128 and D 512 if `shape` says nothing else; milliseconds."""

    def summary(ms: float | None) -> dict | None:
        return ms and {"median": ms, "p20": ms, "p80": ms, "count": 30}

    size = {"batch_size": 4, "sequence_length": 128, "hidden_size": 512} | shape
    unit = "TFLOP/s" if operation in ("attention", "linear_cross_entropy") else "GB/s"
    return {
        "operation": operation,
        **size,
        "unit": unit,
        "amount": amount,
        "contender": contender,
        "host_ms": summary(host),
        "gpu_ms": summary(gpu),
        "peak_mib": 10 * host,
    }


def measurement(rows: list[dict]) -> dict:
    """On a device that copies 2 TB/s and computes 500 TFLOP/s."""
    ceilings = {
        "bytes_per_second": 2e12,
        "flops_per_second": 5e14,
        "operation_seconds": 1e-6,
        "precision": "bf16",
    }
    run = record(precision__compute="bf16", ceilings=ceilings)
    conditions = {
        name: run[name]
        for name in ("command", "date", "device", "environment", "precision", "ceilings")
    }
    return {"schema": schema_of(study_files.KernelBenchmark), **conditions, "rows": rows}


ON_A_GPU = [
    row("rms_norm", "kernel", host=2.0, gpu=1.0),
    row("rms_norm", "eager", host=5.0, gpu=4.0),
    row("linear_cross_entropy", "kernel", host=3.0, gpu=2.0, amount=4 * 10**11),
    row("linear_cross_entropy", "eager", host=9.0, gpu=8.0, amount=4 * 10**11),
    row("linear_cross_entropy", "liger", host=4.0, gpu=None, amount=4 * 10**11),
]


def test_the_table_has_a_row_for_each_contender(tmp_path):
    write_json(tmp_path / "kernels.json", measurement(ON_A_GPU))
    said = kernel_benchmark.render_kernel_benchmark(tmp_path / "kernels.json").markdown()
    header, *body = cells(said[said.index("## Times") :])
    assert "bf16" in said and "A GPU" in said
    times = ["host ms", "GPU ms", "GB/s", "TFLOP/s", "% of ceiling", "eager / it", "MiB"]
    assert header == ["operation", "B x S", "D", "contender", *times]
    assert body == [
        ["rms_norm", "4 x 128", "512", "kernel", "2", "1", "1,000", "", "50", "4", "20"],
        ["rms_norm", "4 x 128", "512", "eager", "5", "4", "250", "", "12.5", "1", "50"],
        ["linear_cross_entropy", "4 x 128", "512", "kernel", "3", "2", "", "200", "40", "4", "30"],
        ["linear_cross_entropy", "4 x 128", "512", "eager", "9", "8", "", "50", "10", "1", "90"],
        # could not be recorded
        ["linear_cross_entropy", "4 x 128", "512", "liger", "4", "", "", "100", "20", "2.25", "40"],
    ]


def test_the_table_of_rates_has_a_row_a_shape_with_peers_beside_the_kernel():
    attention = [
        row("attention", who, 2.0, ms, amount=10**11)
        for who, ms in (("kernel", 1.0), ("eager", 1.5), ("cudnn", 0.5))
    ]
    header, norm, loss, heads = cells(
        tables.markdown(*kernel_benchmark.rate_table(measurement([*ON_A_GPU, *attention])))
    )
    assert "compiled / kernel" not in header  # nobody timed it
    norm, loss, heads = (dict(zip(header, line, strict=True)) for line in (norm, loss, heads))
    assert (
        norm["operation"] == "rms_norm"
        and norm["kernel"] == "1,000 GB/s"
        and norm["% of ceiling"] == "50"
    )
    assert (
        norm["eager / kernel"] == "4"
        and norm["liger / kernel"] == ""
        and norm["kernel's MiB"] == "20"
    )
    assert (
        loss["kernel"] == "200 TFLOP/s"
        and loss["eager / kernel"] == "4"
        and loss["eager's MiB"] == "90"
    )
    # Liger's cannot be replayed: 4 ms of launches over the kernel's 3.
    assert loss["liger / kernel"] == "1.33 (launched)" and loss["liger's MiB"] == "40"
    assert norm["liger's MiB"] == "" and heads["cudnn's MiB"] == "20"
    assert heads["cudnn / kernel"] == "0.5" and heads["eager / kernel"] == "1.5"

"""Tests for the problems, the same for starter/ and solution/ (adapter.py selects one). Two
processes run your functions.

    pytest test_exercises.py -k problem2       # one problem

Each test compares with one process that computes the whole batch, in float32. Tests also count
collectives. They assert no speed.
"""

import adapter
import numpy as np
import pytest
import torch

overlap = adapter.load("problem2_overlap")
accounting = adapter.load("problem4_accounting")
MODEL_BYTES = sum(parameter.nbytes for parameter in adapter.model().parameters())


def check(got: adapter.Arrays, expected: adapter.Arrays) -> None:
    """Asserts the same names, and the same numbers but for rounding in float32."""
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(
            got[name], array, rtol=1e-5, atol=1e-5 * abs(array).max(), err_msg=name
        )


def one_process(step: int = 0) -> adapter.Arrays:
    """The gradients of the whole batch."""
    model = adapter.model()
    model(*adapter.batch(step)).backward()
    return adapter.gradients(model)


def test_problem1_broadcast():
    expected = adapter.arrays(adapter.model(seed=0).named_parameters())
    for weights in adapter.run(adapter.broadcast):
        check(weights, expected)


def test_problem1_gradients():
    for gradients, calls in adapter.run(adapter.average):
        check(gradients, one_process())
        assert calls == {"allreduce": 1}


def test_problem2_buckets():
    """Sizes in bytes: 400, 40, 40, 80, 400, from the last to the first."""
    sizes = [100, 20, 10, 10, 100]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    buckets = overlap.fill_buckets(parameters, 100)
    assert [[parameter.numel() for parameter in bucket] for bucket in buckets] == [
        [100],
        [10, 10, 20],
        [100],
    ]
    assert [parameter for bucket in buckets for parameter in bucket] == parameters[::-1]


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 10**6])
def test_problem2_gradients(bucket_bytes):
    """Every bucket but the last is sent before the last gradient is there."""
    for gradients, calls, early, buckets in adapter.run(adapter.overlap, bucket_bytes):
        check(gradients, one_process(step=1))
        assert calls == {"allreduce": buckets}
        assert early == buckets - 1


def test_problem3_weights():
    model = adapter.model()
    optimizer = torch.optim.AdamW(model.parameters(), **adapter.ADAMW)
    for step in range(3):
        optimizer.zero_grad()
        model(*adapter.batch(step)).backward()
        optimizer.step()
    results = adapter.run(adapter.train_sharded, 3)
    for weights, calls, _ in results:
        check(weights, adapter.arrays(model.named_parameters()))
        assert calls == {"reduce_scatter": 1, "allgather": 1}
    padded = MODEL_BYTES // 4 + 1
    # There are two moments of half the weights.
    assert [elements for *_, elements in results] == [padded, padded]


@pytest.mark.parametrize("stage, gigabytes", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_problem4_memory_of_the_paper(stage, gigabytes):
    """Figure 1 of Rajbhandari et al. 2020: 7.5 B parameters, 64 ranks; 2 bytes a weight and a
    gradient, 12 for the optimizer.
    """
    assert accounting.state_bytes(7_500_000_000, 64, stage, 2, 2, 12) / 1e9 == pytest.approx(
        gigabytes, abs=0.06
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_problem4_bytes_of_a_ring(ranks):
    """Each rank sends 2 (R - 1) messages, each an R-th of the elements in float32."""
    assert accounting.sent_bytes(24 * ranks, ranks, stage=0) == pytest.approx(
        2 * (ranks - 1) * 24 * 4
    )


def test_problem4_bytes_by_stage():
    """Section 7 of the paper: stages 1 and 2 send as much as DDP, and stage 3 sends half as much
    again.
    """
    stages = [accounting.sent_bytes(1000, 4, stage, element=2) for stage in range(4)]
    assert stages == [3000, 3000, 3000, 4500]


def test_problem4_seconds():
    """100 collectives of 20 us, and 3 GB at 100 GB/s."""
    assert accounting.communication_seconds(3e9, 100, 20e-6, 100e9) == pytest.approx(0.032)


@pytest.mark.parametrize("buckets", [1, 4, 10])
@pytest.mark.parametrize("communication", [0.01, 0.08, 0.5])
def test_problem4_exposed(communication, buckets):
    """A backward pass of 0.1 s, bucket by bucket."""
    free = 0.0  # when the network can take the next bucket
    for i in range(buckets):
        free = max(free, (i + 1) / buckets * 0.1) + communication / buckets
    assert accounting.exposed_seconds(communication, 0.1, buckets) == pytest.approx(free - 0.1)

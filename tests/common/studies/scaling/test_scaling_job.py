"""A job of the scaling study: what its traces and its end say."""

import json

from common.config import ModelConfig
from common.files import write_json
from common.studies import known_models
from common.studies.scaling import scaling_job
from tests import study_options
from tests.conftest import ROOT
from tests.records import profile, record
from tests.small_traces import rank_trace

import pytest


def test_what_the_traces_of_a_job_say(tmp_path):
    """The sizes of a captured step's collectives stand in the trace of the eager step."""
    for rank in (0, 1):
        name = f"trace_{f'rank{rank}_' if rank else ''}2026.json"
        (tmp_path / name).write_text(json.dumps(rank_trace(rank, sizes=False)))
    cell = {"processes": 2, "parallel": "zero1"}
    found = scaling_job.traced(tmp_path, cell, False)
    assert [each["bytes"] for each in found["collectives"]] == [None, None]
    (tmp_path / "eager_trace_2026.json").write_text(json.dumps(rank_trace(0)))
    found = scaling_job.traced(tmp_path, cell, False)
    assert [rank["waiting_ms"] for rank in found["ranks"]] == pytest.approx([0.02, 0])
    assert found["collectives"] == [
        {"kind": "all_reduce", "count": 2, "bytes": 8000, "beside": "backward"},
        {"kind": "all_gather", "count": 1, "bytes": 4000, "beside": "nothing"},
    ]
    assert scaling_job.traced(tmp_path, cell, beside_backward=True)["collectives"][1]["beside"] == "backward"
    both = scaling_job.traced(tmp_path, cell | {"parallel": "fsdp"}, False)["collectives"]
    found = [(each["count"], each["bytes"], each["beside"]) for each in both[1:]]
    assert found == [(0.5, 2000, "forward"), (0.5, 2000, "backward")]
    small = ModelConfig(hidden_size=32, num_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=16)
    model = known_models.find(ROOT)["v4"].load().TinyLlama(small)
    assert model.optimizer_communicates  # which a run's record says
    (tmp_path / "trace_rank1_2026.json").unlink()
    assert "1 processes of 2 wrote a trace" in scaling_job.traced(tmp_path, cell, False)["trace_problem"]


def test_the_shares_of_the_step_on_one_process(tmp_path):
    rows = [{"name": "a", "phase": phase, "self_device_us": us} for phase, us in
            (("forward", 10.0), ("backward", 20.0), ("optimizer", 10.0), ("other", 99.0))]  # fmt: skip
    write_json(tmp_path / "profile_2026.json", profile(record(), rows, [{"name": "k"}]))
    found = scaling_job.traced(tmp_path, {"processes": 1, "parallel": None}, False)
    assert found == {"shares": {"forward": 0.25, "backward": 0.5, "optimizer": 0.25}}


def test_a_job_that_fails(tmp_path):
    script = tmp_path / "tiny_llama_broken.py"
    script.write_text("import sys\nprint('error: out of memory: lower --batch-size', file=sys.stderr)\nsys.exit(1)")
    cell = {"model": "broken", "parallel": None, "processes": 1, "batch_size": 1}
    found = scaling_job.run(cell, known_models.Model("broken", script), study_options.scaling(), profiled=False)
    assert found == {"status": "out of memory", "reason": "out of memory: lower --batch-size"}

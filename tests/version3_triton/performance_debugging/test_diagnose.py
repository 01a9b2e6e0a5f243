"""Statistics of every layer: they lead to the stage whose weights are wrong, and count what is not
a number.
"""

import math

from common import data
from tests.conftest import markov
from tests.version3_triton.performance_debugging.conftest import SMALL, stage_of

import diagnose
import pytest
import torch


def test_diagnosis_leads_to_the_embedding(no_kernels, monkeypatch, capsys):
    monkeypatch.setattr(data, "markov", markov)

    def diagnosed(*flags: str) -> dict[str, list[str]]:
        stage = stage_of("stage1")
        assert stage.train(stage.options([*SMALL, "--diagnose", *flags])) == 0
        return {
            line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[3:]
        }

    broken, fixed = diagnosed(), diagnosed("--fixed")
    assert list(broken) == [
        "embed_tokens",
        "layers.0.self_attn",
        "layers.0.mlp",
        "layers.0",
        "layers.1.self_attn",
        "layers.1.mlp",
        "layers.1",
        "norm",
        "lm_head",
    ]
    std, weight = 2, 4
    assert float(broken["embed_tokens"][weight]) == pytest.approx(1, abs=0.05)
    assert float(fixed["embed_tokens"][weight]) == pytest.approx(math.sqrt(2 / 5 / 32), rel=0.05)
    assert float(broken["lm_head"][std]) > 3 * float(fixed["lm_head"][std])
    # a norm hides what came before
    assert float(broken["norm"][std]) == pytest.approx(float(fixed["norm"][std]), abs=0.05)


def test_diagnosis_counts_what_is_not_a_number(small_model):
    model = small_model("stage5")
    model.layers[1].mlp.down_proj.weight.data[0] = math.nan
    rows = {row[0]: row for row in diagnose.statistics(model, torch.zeros(1, 8, dtype=torch.long))}
    assert (
        rows["layers.0"][4] == 0
        and rows["layers.1.mlp"][4] == 8
        and rows["layers.1.mlp"][1] is not None
    )
    assert rows["lm_head"][4] == 8 * 1000 and rows["lm_head"][1] is None
    assert not any(module._forward_hooks for module in model.modules())

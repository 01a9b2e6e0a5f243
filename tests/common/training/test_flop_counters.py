"""FLOPs of Version 2 by counters that do not know its formulas."""

from common.training import flop_counters
from tests import models
from tracepage.cost import flops
from version2_pytorch_fused import tiny_llama_v2

import pytest


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_flop_counters_see_the_full_attention_of_version_2(kv_heads, tmp_path):
    config, batch = models.config(kv_heads), models.batch()
    model = tiny_llama_v2.TinyLlama(config)
    counted = flop_counters.count(model, batch, tmp_path)
    assert all(parameter.grad is None for parameter in model.parameters()), (
        "the first step would add to them"
    )
    full = flops.training_step(config, *batch[0].shape, causal=False)
    scores_again = flops.forward(config, *batch[0].shape, causal=False)["attention"] // 2
    assert counted["FlopCounterMode"] == {
        "forward": full["forward"],
        "backward": full["backward"] + scores_again,
    }
    if "DeepSpeed" in counted:
        assert counted["DeepSpeed"]["forward"] == pytest.approx(full["forward"], rel=0.01)
        assert counted["DeepSpeed"]["forward"] > full["forward"], "it adds silu"

"""The models that are found: versions as they come, their variants, and the external baselines."""

from studies.peers import external_baselines, known_models
from tests.conftest import ROOT

V2 = ROOT / "version2_pytorch_fused"
KNOWN = known_models.find(ROOT)


def test_versions_are_found_as_they_come(tmp_path):
    for name in (
        "version1_a/tiny_llama_v1.py",
        "version3_b/tiny_llama_v3.py",
        "version3_b/tiny_llama_v3_config.yaml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("TinyLlama = make_model = make_optimizer = make_step = None")
    names = ["v1", "v3", *external_baselines.PEERS]  # no v2, and no version has torch.compile
    captured = [f"{name}-captured" for name in names if not name.startswith("captured")]
    deterministic = ["v1", "v3", "v1-captured", "v3-captured"]
    assert list(known_models.find(tmp_path)) == [
        *names,
        *captured,
        *(f"{name}-deterministic" for name in deterministic),
    ]
    compiled, captured = KNOWN["v2-compile"], KNOWN["v2-compile-captured"]
    assert compiled.flags == captured.flags == ("--enable-torch-compile",)
    assert (compiled.captured, captured.captured) == (False, True)
    beside = KNOWN["v2-compile-captured-deterministic"]
    assert beside.deterministic and beside == captured._replace(
        name=beside.name, deterministic=True
    )
    assert compiled.load().__file__ == captured.load().__file__ == str(V2 / "tiny_llama_v2.py")
    assert (
        KNOWN["v4-no-early-update"].flags == ("--disable-early-update",)
        and "v4-no-fp8" not in KNOWN
    )
    assert KNOWN["v4-fp32-residual-gradient"].flags == ("--enable-fp32-residual-gradient",)
    assert KNOWN["v4-bf16-moments"].flags == ("--enable-bf16-moments",)
    assert KNOWN["v4-fp8"].flags == ("--enable-fp8",) and "v3-fp8" not in KNOWN
    assert (
        KNOWN["hf-captured"].load() is external_baselines.PEERS["hf"] and "v1-compile" not in KNOWN
    )

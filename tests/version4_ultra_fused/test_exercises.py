"""The tables of Version 4's exercise; tests/version3_triton/test_exercises.py runs its tests."""

from common.config import resolve
from tests.conftest import ROOT, cells

PAGE = ROOT / "version4_ultra_fused/exercises/exercise1_ultra_fusion.md"


def test_the_sizes_and_the_saved_bytes_in_the_document_are_those_of_the_presets():
    rows = {row[0]: row[1:] for row in cells(PAGE.read_text())}  # the solution's table comes last
    saved = {}
    for preset in ("tiny", "medium"):
        config = resolve(preset)
        tokens = config.training.batch_size * config.training.sequence_length
        hidden, features, layers = config.model.hidden_size, config.model.intermediate_size, config.model.num_layers
        sizes = [int(cell.split("=")[-1].replace(",", "")) for cell in rows[preset]]
        assert sizes == [tokens, hidden, features, layers]
        parts = [2 * tokens * features * 2, 2 * 2 * tokens * hidden * 2, 2 * tokens * features * 2]
        saved[preset] = [*parts, layers * sum(parts)]
    names = (
        "1a: SwiGLU", "1b: residual stream, two additions", "1c: SwiGLU's gradient, which saves 2 N F e bytes too", "all layers",
    )  # fmt: skip
    for name, tiny, medium in zip(names, saved["tiny"], saved["medium"], strict=True):
        assert rows[name] == [f"{tiny / 2**20:g}", f"{medium / 2**20:g}", f"{medium / 4.8e12 * 1e6:.0f}"]

"""The marked tables of the documents: where their rows come from, and what is said of a marker that cannot be filled."""

from common.documents import rewrite
from common.errors import UsageError

import pytest

DERIVED = (
    "presets", "shapes", "parameters", "forward_flops", "states", "activations", "quadratic", "intensity", "balance", "limits",
    "fusion", "fusion_bytes", "intensities", "attention_io",
)  # fmt: skip


@pytest.mark.parametrize("name", DERIVED)
def test_every_row_has_as_many_cells_as_the_header(name):
    lines = rewrite.TABLES[name]().strip().splitlines()
    assert len(lines) > 2
    assert len({line.count(" | ") for line in lines}) == 1


def test_a_stale_table_is_noticed():
    text = "<!-- table: parameters -->\nold\n<!-- /table -->\n"
    assert rewrite.refreshed(text) != text and rewrite.refreshed(rewrite.refreshed(text)) == rewrite.refreshed(text)


def test_an_unknown_table_is_refused_and_the_known_ones_are_named():
    with pytest.raises(UsageError, match="parametres.*parameters"):
        rewrite.refreshed("<!-- table: parametres -->\n<!-- /table -->\n")

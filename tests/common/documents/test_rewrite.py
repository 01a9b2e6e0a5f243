"""The marked tables of the documents: where their rows come from, and what is said of a marker that cannot be filled."""

from common.documents import rewrite
from common.errors import UsageError

import pytest


@pytest.mark.parametrize("marker", ["table: parameters", "section: results/h200/kernels_loss.json#rates"])
def test_what_is_stale_is_noticed(marker):
    text = f"<!-- {marker} -->\nold\n<!-- /{marker.split(':')[0]} -->\n"
    assert rewrite.refreshed(text) != text and rewrite.refreshed(rewrite.refreshed(text)) == rewrite.refreshed(text)


@pytest.mark.parametrize("marker, message", [
    ("table: parametres", "parametres.*parameters"), ("picture: lader results", "no picture is called lader; .*ladder"),
])  # fmt: skip
def test_what_is_unknown_is_refused_and_the_known_ones_are_named(marker, message):
    with pytest.raises(UsageError, match=message):
        rewrite.refreshed(f"<!-- {marker} -->\n<!-- /{marker.split(':')[0]} -->\n")

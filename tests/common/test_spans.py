"""The names of the spans in the code are those that profiles are read by."""

import re

from tests.conftest import ROOT
from tracepage.span_names import INNER_SPANS, SPANS

SPAN = re.compile(r"\bspan\(\"(\w+)\"\)")


def test_every_span_in_a_version_has_a_known_name():
    """A kernel in a span of another name would count for no span."""
    names = set()
    for folder in (*ROOT.glob("version*_*"), ROOT / "studies"):
        for path in folder.rglob("*.py"):
            names |= set(SPAN.findall(path.read_text(encoding="utf-8")))
    assert names >= {*SPANS, *INNER_SPANS}
    assert names <= {*SPANS, *INNER_SPANS}, names - {*SPANS, *INNER_SPANS}

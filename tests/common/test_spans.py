"""The names of the spans in the code are those that profiles are read by."""

import re
from contextlib import nullcontext

from common import spans
from tests.conftest import ROOT
from tracepage.readers import nsys
from tracepage.span_names import INNER_SPANS, SPANS

import torch

SPAN = re.compile(r"\bspan\(\"(\w+)\"\)")


def test_every_span_in_a_version_has_a_known_name():
    """A kernel in a span of another name would count for no span."""
    names = set()
    for folder in (*ROOT.glob("version*_*"), ROOT / "studies"):
        for path in folder.rglob("*.py"):
            names |= set(SPAN.findall(path.read_text(encoding="utf-8")))
    assert names >= {*SPANS, *INNER_SPANS}
    assert names <= {*SPANS, *INNER_SPANS}, names - {*SPANS, *INNER_SPANS}


def test_a_page_knows_the_range_of_a_step(monkeypatch):
    names = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: names.append(name) or nullcontext())
    with spans.step_range(12):
        pass
    assert [nsys.STEP_RANGE.fullmatch(name)["number"] for name in names] == ["12"]

"""Where kernels are launched before the kernel before them has ended."""

import pytest

pytest.importorskip("triton")
from version3_triton.kernels import dependent_launch


@pytest.mark.parametrize("family, interpreted, expected", [
    ("sm_90", False, {"DEPENDENT": True, "launch_pdl": True}), ("sm_80", False, {}), ("hip", False, {}), ("sm_90", True, {}),
])  # fmt: skip
def test_only_compiled_kernels_on_hopper_are_launched_early(monkeypatch, family, interpreted, expected):
    monkeypatch.setattr(dependent_launch, "INTERPRETED", interpreted)
    monkeypatch.setattr(dependent_launch, "family", lambda: family)
    assert dependent_launch.dependent() == expected

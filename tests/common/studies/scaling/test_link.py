"""The link is given, or measured by all-reduces."""

import sys

from common import ranks
from common.studies.scaling import link, torchrun
from tests import study_options


def test_a_link_is_measured_by_all_reduces(tmp_path, monkeypatch):
    """One process does what two do; the job is made up, but for its command."""
    for name, value in zip(ranks.VARIABLES, (0, 0, 1, "localhost", 0), strict=True):
        monkeypatch.setenv(name, str(value))

    def run(processes, command, chosen, folder, gpus=None):
        assert (processes, command[:2]) == (2, ["-m", "common.studies.scaling.link"])
        monkeypatch.setattr(sys, "argv", command[1:])
        link.main()
        return 0, ""

    monkeypatch.setattr(torchrun, "run", run)
    found, problem = link.find(study_options.scaling(link_us=None, link_gbs=None), needed=True)
    assert problem is None and found["gb_per_second"] > 0 and found["source"] == "all-reduces between 2 processes"
    assert [message["bytes"] for message in found["messages"]] == list(link.MESSAGE_BYTES["cpu"])
    found, _ = link.find(study_options.scaling(link_us=7.0, link_gbs=None), needed=True)
    assert found["microseconds"] == 7 and found["source"].endswith("; microseconds given")
    assert link.find(study_options.scaling(link_us=None), needed=False) == (None, None)

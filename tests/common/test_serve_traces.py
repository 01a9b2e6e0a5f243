"""Traces for Perfetto's page: it may read them, and nothing else is served."""

import threading
import urllib.error
import urllib.request

from common import serve_traces
from common.errors import UsageError
from tests.conftest import ROOT

import pytest


@pytest.fixture
def address(tmp_path, monkeypatch):
    """Of a server of the traces in a folder that also has a profile."""
    monkeypatch.setenv("no_proxy", "*")
    for name in ("trace_1.json", "trace_2.json", "eager_trace_2.json", "profile_1.json"):
        (tmp_path / name).write_text(name)
    with serve_traces.server(serve_traces.find([tmp_path]), port=0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_perfettos_page_may_read_a_trace_and_nothing_else_is_served(address):
    with urllib.request.urlopen(f"{address}/trace_2.json") as answer:
        assert answer.read() == b"trace_2.json"
        assert answer.headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
    for name in ("profile_1.json", "", "../trace_1.json", "%2e%2e/trace_1.json"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/{name}")


def test_traces_are_found_the_newest_first_and_what_is_none_is_named(address, tmp_path, refused):
    assert list(serve_traces.find([tmp_path])) == ["trace_2.json", "trace_1.json", "eager_trace_2.json"]
    assert list(serve_traces.find([tmp_path / "profile_1.json"])) == ["profile_1.json"], "who names a file wants it"
    assert "v1_small.json.gz" in serve_traces.find([ROOT / "results/h200/traces"])
    assert "missing is no trace" in refused(ROOT / "common/serve_traces.py", "missing")


def test_a_port_that_is_taken_is_named(address):
    with pytest.raises(UsageError, match=r"port \d+ of this machine: Address already in use"):
        serve_traces.server({}, int(address.rpartition(":")[2]))

"""A pytest plugin: a failure's report is written the moment it is known."""
import os
def pytest_runtest_logreport(report):
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        with open("/tmp/out/failures.txt", "a") as f:
            f.write(f"==== {report.nodeid} ({report.when})\n{report.longreprtext[-6000:]}\n")

"""Settings that every test shares."""

import os

import pytest
from hypothesis import HealthCheck, settings

# No deadline: how long one example takes is the machine's business, and wall time is no verdict here.
# print_blob: a failure found by chance is repeated by the line that it prints.
settings.register_profile("kvgate", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvgate")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With KVGATE_NO_SKIPS=1 a skipped test fails the run: what CI did not run, it must not seem to have run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("KVGATE_NO_SKIPS") == "1" and skipped and exitstatus == pytest.ExitCode.OK:
        for report in skipped:
            reporter.write_line(f"\nskipped, and KVGATE_NO_SKIPS=1: {report.nodeid}: {report.longrepr[2]}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

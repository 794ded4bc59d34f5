"""Fixtures: real clusters, each in a state directory of its own."""
import errno
import json
import os
import random
import socket
import subprocess
import time

import pytest

import sanitizer
import starved
from local_cluster import BUILD, EVERY_CLUSTER, LOCAL, ROOT, Cluster, scrape  # noqa: F401
from sanitizer import PATIENCE

CALIBRATED = "--set", "prefill.engine.calibrate_ms=2s", "--set", "decode.engine.calibrate_ms=2s"
CTL = os.path.join(BUILD, "bin", "batonctl")


def pytest_configure():
    """An engine measures its steps for up to two seconds of CPU before it serves. Tests of what is planned by such costs have
    CALIBRATED among their options; in the benches, which are not run by pytest, all do it."""
    EVERY_CLUSTER[:0] = "--set", "prefill.engine.calibrate_ms=0", "--set", "decode.engine.calibrate_ms=0"


starved.WATCH.start()
STARVED = []  # tests of this run that were skipped for it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.began_s = time.monotonic()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """A failed test whose processes were starved is skipped (starved.py); what it printed is printed all the same."""
    report = (yield).get_result()
    if not report.failed:
        return
    text = "\n".join([report.longreprtext, report.capstdout, report.capstderr])
    why = starved.verdict(text, starved.WATCH.since(item.began_s))
    tests = STARVED if item.nodeid in STARVED else STARVED + [item.nodeid]
    if why is None or item.nodeid not in starved.within_limit(tests)[0]:
        return
    STARVED[:] = tests
    report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, why)
    item.config.stash.setdefault(OUTPUT, []).append(f"skipped: {item.nodeid}: {why}\n{text}")


OUTPUT = pytest.StashKey()


def pytest_terminal_summary(terminalreporter, config):
    for text in config.stash.get(OUTPUT, []):
        terminalreporter.write_line(text)


def wait_for(check, seconds, what, every_s=0.05):
    """Polls until check() is truthy and returns it; fails after `seconds`, longer if instrumented."""
    seconds *= PATIENCE
    end = time.monotonic() + seconds
    while True:
        v = check()
        if v:
            return v
        assert time.monotonic() < end, f"not within {seconds} s: {what}; last: {v!r}"
        time.sleep(every_s)


def port_of_nobody(host="127.0.0.1"):
    """A free port, below those that the kernel chooses and that baton-local gives to etcd: so it stays free."""
    while True:
        port = random.randrange(10000, 15000)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            try:
                s.bind((host, port))
                return port
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise


@pytest.fixture(scope="session")
def cluster():
    """The default two-node cluster, shared by tests that leave it as it was."""
    c = Cluster()
    yield c
    c.stop()


@pytest.fixture
def make_cluster():
    """Clusters of one test's own: make_cluster('--nodes', '1')."""
    made = []

    def make(*options):
        made.append(Cluster(*options))
        return made[-1]

    yield make
    stop_all(made)


def stop_all(clusters):
    """Also those behind one that does not stop in order."""
    failures = []
    for c in clusters:
        try:
            c.stop()
        except (AssertionError, subprocess.SubprocessError) as e:
            failures.append(str(e))
    assert not failures, "\n".join(failures)


def fail_if_reported():
    found = sanitizer.take_reports()
    assert not found, "a sanitizer's report:\n" + found


@pytest.fixture(scope="session", autouse=True)
def no_report_at_the_end():
    """Of daemons that several tests share: they end with the session or a module."""
    yield
    fail_if_reported()


@pytest.fixture(autouse=True)
def no_report():
    yield
    fail_if_reported()


def golden(name):
    with open(os.path.join(ROOT, "tests", "golden", name)) as f:
        return json.load(f)

"""When a failed test counts as starved (starved.py), when not, and how often in a run."""
import os
import subprocess
import sys
import threading
import time

import pytest

import starved

HERE = os.path.dirname(os.path.abspath(__file__))
PID = 4711


@pytest.fixture
def watch(tmp_path):
    """A watch over a process whose numbers the test sets: set_waits({thread: (seconds, runs)})."""
    w = starved.Watch(str(tmp_path))

    def set_waits(threads, pid=os.getpid()):
        for tid, (seconds, runs) in threads.items():
            folder = tmp_path / str(pid) / "task" / str(tid)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"1 {int(seconds * 1e9)} {runs}\n")

    w.set_waits, w.last_s = set_waits, 99
    set_waits({1: (50, 1000)})
    w.look(100)
    return w


@pytest.mark.parametrize("waited,runs,elapsed,at_least", [
    (1.5, 1, 0.25, 1.5),     # one wait
    (1.5, 10, 0.25, 1.25),   # one of them is as long: the others have begun since the last look
    (1.5, 1000, 3, 0.0015),  # ... or a thousand short ones, as the looks were far apart
    (0, 0, 0.25, 0),
])
def test_longest_wait(waited, runs, elapsed, at_least):
    assert starved.longest_wait((7, 70), (7 + waited, 70 + runs), elapsed) == pytest.approx(at_least)


def test_a_long_wait_is_noted(watch):
    watch.set_waits({1: (51.5, 1001)})
    watch.look(100.25)
    assert [(s, who) for _, s, who in watch.stretches] == [(1.5, "the test (thread 1)")]
    watch.look(100.5)
    assert len(watch.stretches) == 1  # once


def test_short_waits_are_none(watch):
    """A busy machine: the thread waits most of the time, but never for long."""
    for i in range(1, 40):
        watch.set_waits({1: (50 + 0.24 * i, 1000 + 20 * i)})
        watch.look(100 + 0.25 * i)
    assert watch.stretches == []


def test_what_a_new_thread_has_waited_before_is_unknown(watch):
    watch.set_waits({2: (30, 1)})
    watch.look(100.25)
    assert watch.stretches == []


def test_other_processes(watch):
    watch.also(PID, "kvstore-n1")
    watch.set_waits({PID: (0, 1)}, PID)
    watch.look(100.25)
    watch.set_waits({PID: (2, 2)}, PID)
    watch.look(100.5)
    assert watch.stretches == [(100.5, 2, f"kvstore-n1 (thread {PID})")]
    os.unlink(os.path.join(watch.proc, str(PID), "task", str(PID), "schedstat"))  # it has ended
    watch.look(100.75)
    assert PID not in watch.names


def test_only_what_was_noted_while_the_test_ran(watch):
    watch.stretches = [(99, 3, "a"), (105, 2, "b")]
    assert watch.since(100) == [(105, 2, "b")]


def test_the_kernel_counts():
    """Two processes on one CPU wait for each other."""
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("this kernel does not count")
    code = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass" % min(os.sched_getaffinity(0))
    spinners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        end = time.monotonic() + 30
        while any(starved.waits_of(p.pid).get(p.pid, (0, 0))[0] < 0.05 for p in spinners):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        for p in spinners:
            p.kill()
            p.wait()


def test_a_lock_is_no_wait():
    """A thread that waits for a lock is not ready."""
    def mine():
        return starved.waits_of(os.getpid()).get(threading.get_native_id(), (0, 0))[0]

    start = time.monotonic()
    before = mine()
    threading.Event().wait(1)
    assert mine() - before <= time.monotonic() - start - 0.9  # it can have waited for a CPU only behind that second


def test_verdict():
    waits = [(5, 1.2, "the test (thread 1)"), (6, 2.5, "kvstore-n1 (thread 9)")]
    assert starved.verdict("assert 0 == 40", []) is None
    assert starved.verdict("assert 0 == 40", waits) == (
        "starved: kvstore-n1 (thread 9) was ready to run and got no CPU for 2.5 s (2 waits of 1.0 s or more)")
    for fact in ("level=crit ev=assert_failed at=x.c:1", "ERROR: AddressSanitizer: heap-use-after-free",
                 "AssertionError: a sanitizer's report:\n"):
        assert starved.verdict("assert 0 == 40\n" + fact, waits) is None


def test_within_limit():
    assert starved.within_limit([]) == ([], [])
    assert starved.within_limit(list("abc")) == (list("abc"), [])
    assert starved.within_limit(list("abcde")) == (list("abc"), list("de"))


def outcome(tmp_path, text):
    """What pytest with this folder's conftest.py says of such a file."""
    (tmp_path / "test_it.py").write_text(
        "import time, pytest, starved\n"
        "def hungry():\n    starved.WATCH.stretches.append((time.monotonic(), 1.5, 'kvstore-n1'))\n" + text)
    p = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-rs", "test_it.py"],
                       cwd=tmp_path, env=dict(os.environ, PYTHONPATH=HERE), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    return p.returncode, p.stdout.decode()


def test_three_are_skipped_with_their_evidence(tmp_path):
    rc, said = outcome(tmp_path, "@pytest.mark.parametrize('i', range(3))\ndef test_x(i):\n    hungry()\n    assert i == 'this is shown'\n")
    assert rc == 0 and "3 skipped" in said and "failed" not in said, said
    assert said.count("kvstore-n1 was ready to run and got no CPU for 1.5 s") >= 3 and "this is shown" in said


def test_a_fourth_has_failed(tmp_path):
    rc, said = outcome(tmp_path, "@pytest.mark.parametrize('i', range(4))\ndef test_x(i):\n    hungry()\n    assert False\n")
    assert rc == 1 and "1 failed, 3 skipped" in said, said


def test_who_was_not_starved_has_failed(tmp_path):
    """Nor does an earlier test's wait help, or one of a test that passed."""
    rc, said = outcome(tmp_path, "def test_a():\n    hungry()\n\ndef test_b():\n    assert False\n")
    assert rc == 1 and "1 failed, 1 passed" in said, said


def test_a_test_that_fails_again_at_its_end_counts_once(tmp_path):
    rc, said = outcome(tmp_path, "@pytest.fixture\ndef f():\n    yield\n    assert False\n\n"
                       "@pytest.mark.parametrize('i', range(3))\ndef test_x(f, i):\n    hungry()\n    assert False\n")
    assert rc == 0 and "failed" not in said.splitlines()[-1], said


def test_a_report_is_a_fact(tmp_path):
    rc, said = outcome(tmp_path, "def test_x():\n    hungry()\n    print('ev=assert_failed')\n    assert False\n")
    assert rc == 1 and "1 failed" in said, said

"""Did the machine run a test's processes at all? A test that failed, and of which a process was ready to run but got no
CPU for a second or more, says nothing about the code: it ends as `skipped: starved (evidence)`. This file alone decides
it, for a test (verdict) and for a run (within_limit). conftest.py and tests/run ask it.

The kernel keeps the evidence: /proc/PID/task/TID/schedstat has the time that a thread was ready and waited for a CPU, in
ns, and how often it was given one. A thread that waits for a lock, for the network or for Python's interpreter lock is
not ready: a slow or blocked test is no starved one."""
import os
import threading
import time

import sanitizer

# Half of what a session may be silent (common/rpc/session_core.h): daemons trust their own watch over others no more
# after they have stood still for so long.
STRETCH_S = 1.0
PER_RUN = 3
LOOK_S = 0.25
WORD = "starved: "


def waits_of(pid, proc="/proc"):
    """{thread: (seconds that it has waited for a CPU, how often it got one)} of this process, and of another one's main
    thread, which has its sessions. Empty: the process has ended, or this kernel does not count."""
    out = {}
    try:
        for tid in os.listdir(f"{proc}/{pid}/task") if pid == os.getpid() else [pid]:
            with open(f"{proc}/{pid}/task/{tid}/schedstat") as f:
                _, waited_ns, runs = f.read().split()
            out[int(tid)] = int(waited_ns) / 1e9, int(runs)
    except (OSError, ValueError):
        pass
    return out


def longest_wait(was, now, elapsed_s):
    """The longest of a thread's waits that ended between two looks was at least so long: the kernel adds each wait when it
    ends, all but the first have begun since the first look, and no wait is shorter than all are on average."""
    waited, runs = now[0] - was[0], now[1] - was[1]
    return max(waited - elapsed_s, waited / runs if runs > 0 else 0)


class Watch:
    """Looks at this process, and at those that it is told of, a few times a second."""

    def __init__(self, proc="/proc"):
        self.proc, self.lock = proc, threading.Lock()
        self.names, self.stretches = {os.getpid(): "the test"}, []
        self.last, self.last_s = {}, time.monotonic()

    def start(self):
        threading.Thread(target=self._loop, daemon=True).start()
        return self

    def _loop(self):
        while True:
            self.look(time.monotonic())
            time.sleep(LOOK_S)

    def also(self, pid, name):
        with self.lock:
            self.names.setdefault(int(pid), name)

    def look(self, now_s):
        """Notes the waits of STRETCH_S or more that have ended since the last look: (when, seconds, whose)."""
        with self.lock:
            seen = {}
            for pid, name in list(self.names.items()):
                threads = waits_of(pid, self.proc)
                if not threads and pid != os.getpid():
                    del self.names[pid]
                for tid, now in threads.items():
                    seen[pid, tid] = now
                    wait_s = longest_wait(self.last.get((pid, tid), now), now, now_s - self.last_s)
                    if wait_s >= STRETCH_S:
                        self.stretches.append((now_s, wait_s, f"{name} (thread {tid})"))
            self.last, self.last_s = seen, now_s

    def since(self, start_s):
        """What was noted since then, with a wait that ended just now."""
        self.look(time.monotonic())
        return [s for s in self.stretches if s[0] >= start_s]


WATCH = Watch()  # conftest.py starts it, and fixtures name their daemons to it


def verdict(failure, stretches):
    """failure: the text of a failed test; stretches: of Watch, while it ran. Returns the reason to skip it; None: it has
    failed. What a sanitizer or an assertion has reported is a fact, however busy the machine was."""
    if not stretches or sanitizer.REPORT.search(failure) or "a sanitizer's report" in failure:
        return None
    _, seconds, who = max(stretches, key=lambda s: s[1])
    return (f"{WORD}{who} was ready to run and got no CPU for {seconds:.1f} s "
            f"({len(stretches)} waits of {STRETCH_S} s or more)")


def within_limit(tests):
    """A run's starved tests, in their order -> (those that stay skipped, those that count as failed)."""
    return tests[:PER_RUN], tests[PER_RUN:]

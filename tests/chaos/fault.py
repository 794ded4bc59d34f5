"""How a fault of a chaos run is written: a function with @fault, which gets a Context (chaos.py), and what several need."""
import os
import signal
import threading
import time

from cluster import PATIENCE, scrape
from load import Broken, Lost, Refused


class Fault:
    def __init__(self, function, cases, uses, needs=""):
        self.function, self.cases, self.uses, self.needs = function, cases, frozenset(uses.split()), needs
        self.name = function.__name__


FAULTS = []


def fault(cases, uses, needs=""):
    """cases: numbers of docs/FAULTS.md. uses: what no other fault may use at the same time. needs: net, disk or root."""
    def add(function):
        FAULTS.append(Fault(function, cases, uses, needs))
        return function
    return add


class Background(threading.Thread):
    """A request of a fault's own. result: the Answer, None (left), or the exception."""

    def __init__(self, x, conductor, case, stream=True, **more):
        super().__init__(daemon=True)
        self.x, self.conductor, self.case, self.stream, self.more = x, conductor, case, stream, more
        self.tokens, self.result = 0, None
        self.begun = time.monotonic()
        self.start()

    def run(self):
        def count(a):
            self.tokens = max(len(t) for t in a.text.values())

        try:
            self.result = self.x.load.client.ask(self.conductor, self.case, "gamma", self.stream, timeout=30,
                                                 on_event=count if self.stream else None, **self.more)
        except Exception as e:
            self.result = e

    def wait(self, seconds):
        self.join(seconds * PATIENCE + self.x.load.slack())
        if self.is_alive():
            raise AssertionError(f"{self.case.name} is still open after {seconds} s")
        return self.result

    def must_equal(self, seconds=60):
        """Refusals aside, which any request may meet."""
        got = self.wait(seconds)
        if isinstance(got, (Refused, Broken)) and not getattr(got, "began", False):
            return
        if isinstance(got, Lost) and self.x.load.workers_lost(self.begun) >= 2:
            return
        if isinstance(got, Exception):
            raise AssertionError(f"{self.case.name}: {got!r}")
        if got.differs(self.case.want):
            raise AssertionError(f"{self.case.name}: {got.differs(self.case.want)}")


def shape_of(x, conductor, background):
    """What batonctl requests says of it, by its number of prompt tokens; None if it is not open."""
    rows = x.cluster.ctl_json("requests", "--limit", "500", conductor=conductor)
    return next((r for r in rows if r["prompt_tokens"] == background.prompt_tokens), None)


def restart(x, d, most=2.0):
    time.sleep(x.rng.uniform(0, most))
    d.start_again()


def a_worker(x, role):
    return x.rng.choice(x.cluster.kind(role))


def stop(x, d):
    seconds = x.rng.choice([1, 3, 10])
    x.note(f"{d.name} for {seconds} s")
    d.lost()
    d.signal_all(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        d.signal_all(signal.SIGCONT)
        d.lost()


def listening(pids):
    """TCP ports on which the processes listen."""
    mine = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                mine.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:
                pass
    with open(f"/proc/{pids[0]}/net/tcp") as f:
        rows = [line.split() for line in f][1:]
    return sorted(int(r[1].split(":")[1], 16) for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in mine)


def slow(x, d, period=0.1):
    """Half of the time it stands still."""
    x.note(d.name)
    end = time.monotonic() + x.rng.uniform(4, 8)
    try:
        while time.monotonic() < end:
            d.signal(signal.SIGSTOP)
            time.sleep(period)
            d.signal(signal.SIGCONT)
            time.sleep(period)
    finally:
        d.signal(signal.SIGCONT)


def healthy(c):
    try:
        return bool(scrape(f"{c.host}:{c.port}"))
    except (OSError, AssertionError):
        return False

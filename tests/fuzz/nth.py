#!/usr/bin/python3
"""Fails the n-th allocation (ENOMEM) or the n-th write to a file (ENOSPC) of a daemon, for one n after another: what
tests/cluster/test_nth.py does for some. The daemon must go on, or end and name the cause; no answer may be wrong, no request
hang, and all must recover. Prints what came of each kind and every failure; exit 1 if there was one.

    tests/fuzz/nth.py [--daemon conductor|kvstore|prefill|decode] [--kind memory|disk] [--when serving|starting]
                      [--from N] [--to N] [--step N] [--seconds S] [--seed S]      (BUILD: the build directory)

Without --to: as many as the daemon has calls until it is ready (starting), or in a second of load (serving). A case takes one to
three seconds, so every n of a kind takes hours: --step 7 does every seventh, from a first one that the seed chooses.
"""
import argparse
import os
import random
import sys
import time
from collections import Counter

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
os.environ["PATH"] = os.path.join(ROOT, "build", "third", "etcd", "usr", "bin") + ":" + os.environ["PATH"]
from nth_rounds import KINDS, TARGETS, Nth  # noqa: E402


def calls(run, target, kind, when):
    """Of the kind, until it is ready or in a second of load."""
    d = run.daemons[target]
    if when == "starting":
        d.p.kill()
        d.p.wait()
        d.start_again()
        n = d.armed().calls(kind)
        run.wait_right("the number of calls is known")
        return n
    before, begun = d.armed().calls(kind), time.monotonic()
    run.load(lambda: time.monotonic() - begun > 1, dict(right=0, unserved=0, wrong=[], last=""))
    return d.armed().calls(kind) - before


def recover(run):
    for d in run.daemons.values():
        if not d.alive():
            d.start_again()
    run.wait_right("after a failure")


def sweep(o, run, target, kind, when, end):
    """One daemon, one kind, one phase. What came of it, counted."""
    came, rng = Counter(), random.Random(o.seed)
    last = o.to or calls(run, target, kind, when)
    for n in range(o.first + rng.randrange(o.step), last + 1, o.step):
        if time.monotonic() > end:
            break
        on = rng.random() < 0.3
        try:
            came[(run.trial if when == "serving" else run.start_trial)(target, kind, n, on)] += 1
        except AssertionError as e:
            came["FAILED"] += 1
            print(f"FAILED {target} {kind} {n}{' on' if on else ''} {when}: {str(e)[-4000:]}", flush=True)
            recover(run)
    print(f"{target:9} {kind:6} {when:8} of {last} calls: " + ", ".join(f"{v} {k}" for k, v in sorted(came.items())), flush=True)
    return came


def main():
    a = argparse.ArgumentParser(description="Fails each allocation or write of a daemon in its turn.")
    a.add_argument("--daemon", choices=TARGETS)
    a.add_argument("--kind", choices=sorted(KINDS))
    a.add_argument("--when", choices=["serving", "starting"])
    a.add_argument("--from", dest="first", type=int, default=1)
    a.add_argument("--to", type=int, default=0)
    a.add_argument("--step", type=int, default=1)
    a.add_argument("--seconds", type=float, default=1e9, help="for each daemon, kind and phase")
    a.add_argument("--seed", type=int, default=int(time.time()))
    o = a.parse_args()
    print(f"seed {o.seed}", flush=True)
    run, total = Nth(o.seed), Counter()
    try:
        for target in [o.daemon] if o.daemon else TARGETS:
            for kind in [o.kind] if o.kind else sorted(KINDS):
                for when in [o.when] if o.when else ["serving", "starting"]:
                    if kind == "disk" and target != "kvstore":
                        continue  # others have no files
                    total += sweep(o, run, target, kind, when, time.monotonic() + o.seconds)
        run.adopted()
    finally:
        run.stop()
    failed = total.pop("FAILED", 0)
    print(f"{sum(total.values())} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

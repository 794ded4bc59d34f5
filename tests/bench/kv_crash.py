#!/usr/bin/python3
"""100 times kill -9 of a kvstore under mixed load (prompts, generated blocks, hand-offs both ways,
eviction, write-behind, promotion), against an oracle of what it had sealed: see
tests/cluster/crash_rounds.py. Every served block is compared; wrong ones end the run. What is not there again is
counted by the reason that the kvstore's log and its slab give (tests/cluster/crash_losses.py).

    tests/bench/kv_crash.py [ROUNDS] [SEED]      (BUILD: the build directory)
"""
import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
os.environ["PATH"] = os.path.join(ROOT, "build", "third", "etcd", "usr", "bin") + ":" + os.environ["PATH"]
from crash_rounds import CrashRun  # noqa: E402


def main():
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    print(f"{kills} kills, seed {seed}", flush=True)
    run = CrashRun(seed)
    n = run.counts
    try:
        while n["kills"] < kills:
            before = dict(n)
            run.round()
            print(f"{n['kills']:4} {run.policy:10} expected {n['expected'] - before['expected']:5} "
                  f"there {n['there'] - before['there']:5} served {n['served'] - before['served']:5} "
                  f"steps {n['steps'] - before['steps']:5} ready {run.ready_ms[-1]:5.0f} ms", flush=True)
        run.finish()
    finally:
        run.stop()
    ratio = n["there"] / max(1, n["expected"])
    ready = sorted(run.ready_ms)
    print(f"bench,kv_crash_kills,{n['kills']},kills,of them while starting {n['early']},-")
    print(f"bench,kv_crash_survived,{n['there']},blocks,{n['expected']} sealed for over 1 s,{ratio:.5f}")
    for why, lost in sorted(run.lost.items(), key=lambda x: -x[1]):
        print(f"bench,kv_crash_lost,{lost},blocks,{why},{lost / max(1, n['expected']):.5f}")
    print(f"bench,kv_crash_wrong,{n['bad']},blocks,{n['served']} served and compared,{n['bad'] / max(1, n['served']):.6f}")
    print(f"bench,kv_crash_ready_p50,{statistics.median(ready):.0f},ms,max {ready[-1]:.0f},-")
    return 0 if ratio >= 0.99 and n["bad"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

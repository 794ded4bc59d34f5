"""A kvstore killed -9 at random moments under mixed load: what it had sealed is there afterwards, and
right. 100 kills: tests/bench/kv_crash.py."""
import crash_losses
from crash_rounds import CrashRun


def test_killed_under_load():
    run = CrashRun(seed=1)
    try:
        while run.counts["kills"] < 5:
            run.round()
        run.finish()
        n = run.counts
        print(n, run.lost)
        assert n["bad"] == 0 and n["served"] > 0, n
        # What was evicted in the last moment before a kill may not have been told yet and is expected all the same: whole
        # batches of evictions, 45 blocks of a round seen. 100 kills are measured against 99 % (the benchmark).
        assert n["expected"] > 200 and n["expected"] - n["there"] <= 100 * n["kills"], (n, run.lost)
        assert all(map(crash_losses.untold, run.lost)), run.lost
    finally:
        run.stop()

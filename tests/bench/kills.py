#!/usr/bin/python3
"""100 kills under running streams: how long their clients wait, and whether a token goes wrong.

Each round runs streams (greedy, sampled with a seed, two choices), kills -9 the daemon that serves
them at a random moment (two in three a decode worker, else a kvstore), starts it again and compares
every stream with its undisturbed run. Prints rounds as they go, and bench lines at the end.

    tests/bench/kills.py [ROUNDS] [SEED]      (BUILD: the build directory)
"""
import os
import random
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from restarts import Restarts  # noqa: E402
from test_faults import BASE, EXACT, run_streams  # noqa: E402

TARGET_MS = 5000


def percentile(values, q):
    v = sorted(values)
    return v[min(len(v) - 1, int(q * len(v)))]


def compare(got, want, count):
    """Adds up what is not as in the undisturbed run."""
    if got.error is not None or not got.done:
        count["failed"] += 1
        return
    for i in want.lps:
        g, w = got.lps.get(i, []), want.lps[i]
        count["tokens"] += len(w)
        count["lost"] += max(0, len(w) - len(g))
        count["doubled"] += max(0, len(g) - len(w))
        if EXACT:
            count["wrong"] += sum(a != b for a, b in zip(g, w)) or got.text[i] != want.text[i]


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    rng = random.Random(seed)
    print(f"{rounds} kills, seed {seed}; tokens are compared {'bit by bit' if EXACT else 'by number'}")
    r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2")
    gaps, calm, count = [], [], dict(tokens=0, lost=0, doubled=0, wrong=0, failed=0, unhit=0)
    try:
        at = (r.c.host, r.c.port)
        bodies = [dict(BASE, max_tokens=400), dict(BASE, max_tokens=400, temperature=0.8, seed=7),
                  dict(BASE, max_tokens=400, temperature=0.8, seed=9, n=2)]
        want = run_streams(at, bodies)
        assert all(w.done for w in want)
        calm = [w.gap * 1e3 for w in want]
        for k in range(rounds):
            kind = "kvstore" if rng.random() < 1 / 3 else "decode"
            killed = []

            def kill():
                time.sleep(rng.random() * 0.2)
                busy = max(r.running("decode").items(), key=lambda x: x[1])
                killed.append((r.kill(kind, busy[0]), busy[1]))

            before = r.total("baton_requests_replanned_total")
            got = run_streams(at, bodies, kill, when=rng.randrange(1, 150))
            for g, w in zip(got, want):
                compare(g, w, count)
            hit = r.total("baton_requests_replanned_total") > before
            count["unhit"] += not hit
            if hit:
                gaps.append(max(g.gap for g in got) * 1e3)
            print(f"{k + 1:4} {kind:8} {killed[0][0]['name']:14} replanned={hit} "
                  f"gap {max(g.gap for g in got) * 1e3:7.0f} ms  {count}", flush=True)
            r.start_again(killed[0][0])
    finally:
        r.stop()
    bad = count["lost"] + count["doubled"] + count["wrong"] + count["failed"]
    print(f"bench,kills_hit,{len(gaps)},kills,all,{len(gaps) / rounds:.2f}")
    for name, q in ("p50", 0.5), ("p99", 0.99), ("max", 1.0):
        v = percentile(gaps, q)
        print(f"bench,kills_gap_{name},{v:.0f},ms,target of {TARGET_MS} ms,{v / TARGET_MS:.2f}")
    print(f"bench,kills_calm_gap,{max(calm):.0f},ms,-,-")
    for name in "lost", "doubled", "wrong":
        print(f"bench,kills_tokens_{name},{count[name]},tokens,{count['tokens']} tokens,"
              f"{count[name] / max(1, count['tokens']):.6f}")
    print(f"bench,kills_streams_failed,{count['failed']},streams,{3 * rounds} streams,"
          f"{count['failed'] / (3 * rounds):.4f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

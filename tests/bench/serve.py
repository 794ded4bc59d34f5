#!/usr/bin/python3
"""TTFT cold and warm, and time per token, through the whole local cluster: two nodes against one worker
that does prefill and decode. All sides run side by side, interleaved, in one run."""
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from local_cluster import ROOT, Cluster  # noqa: E402

ROUNDS = 12
TOKENS = 64


def one(c, prompt):
    """(ttft ms, ms per further token) of one streamed request."""
    start = time.monotonic()
    first = last = None
    n = 0
    for ev in c.stream("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
                                           "ignore_eos": True}):
        if ev != "[DONE]" and ev.get("choices"):
            last = time.monotonic()
            first = first or last
            n += 1
    return (first - start) * 1e3, (last - first) * 1e3 / max(1, TOKENS - 1)


def main():
    with open(os.path.join(ROOT, "deploy", "local", "demo-prompt.txt")) as f:
        text = f.read()
    two = Cluster()
    mono = Cluster("--nodes", "1", "--prefill", "0", "--decode", "1")
    rows = {k: [] for k in ("two_cold", "two_warm", "two_tbt", "mono_cold", "mono_warm", "mono_tbt")}
    try:
        for i in range(ROUNDS + 2):
            prompt = f"{i} {time.time()}\n" + text
            for name, c in (("two", two), ("mono", mono)):
                cold, tbt1 = one(c, prompt)
                warm, tbt2 = one(c, prompt)
                if i >= 2:
                    rows[name + "_cold"].append(cold)
                    rows[name + "_warm"].append(warm)
                    rows[name + "_tbt"] += [tbt1, tbt2]
    finally:
        two.stop()
        mono.stop()
    med = {k: statistics.median(v) for k, v in rows.items()}
    for k, v in rows.items():
        print(f"{k}: median {med[k]:.2f} ms, min {min(v):.2f}, max {max(v):.2f}, n {len(v)}")
    for a, b in (("two_cold", "mono_cold"), ("two_warm", "two_cold"), ("two_warm", "mono_warm"),
                 ("two_tbt", "mono_tbt")):
        print(f"bench,{a},{med[a]:.2f},ms,{b},{med[a] / med[b]:.3f}")


main()

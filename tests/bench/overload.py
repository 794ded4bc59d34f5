#!/usr/bin/python3
"""Ten times more than the cluster can do, for a local CPU cluster: how soon refusals are answered, and what goodput is
left against a load of just what it can do. overload.py [SECONDS] [baton-local options]"""
import http.client
import json
import os
import random
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from conftest import Cluster  # noqa: E402

TTFT_MS, TOKENS, PROMPT = 1000, 16, 256


def one(c, seed, out):
    """Appends (status, ms to the answer's head, ms to the first token, Retry-After)."""
    r = random.Random(str(seed))
    body = json.dumps({"prompt": [r.randrange(300, 1500) for _ in range(PROMPT)], "max_tokens": TOKENS,
                       "temperature": 0, "ignore_eos": True, "stream": True})
    start = time.monotonic()
    try:
        k = http.client.HTTPConnection(c.host, c.port, timeout=60)
        k.request("POST", "/v1/completions", body,
                  {"Content-Type": "application/json", "x-slo-ttft-ms": str(TTFT_MS)})
        a = k.getresponse()
        head = (time.monotonic() - start) * 1e3
        a.read()
        out.append((a.status, head, int(a.getheader("retry-after") or 0)))
        k.close()
    except OSError:
        out.append((0, 0, 0))


def load(c, rate, seconds):
    out, threads = [], []
    start, i = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        t = threading.Thread(target=one, args=(c, (rate, i), out))
        t.start()
        threads.append(t)
        i += 1
        time.sleep(max(0, start + i / rate - time.monotonic()))
    for t in threads:
        t.join()
    good = [o for o in out if o[0] == 200 and o[1] <= TTFT_MS]
    return out, len(good) / seconds


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15
    c = Cluster("--set", "conductor.sched.admission=predict", "--set", "conductor.max_waiting=64",
                *sys.argv[2:])
    random.seed(1)
    try:
        peak, rate = 0, 4.0
        while True:  # what it can do: the rate doubles until goodput does not follow
            _, good = load(c, rate, seconds / 2)
            peak = max(peak, good)
            print(f"rate {rate:g}: {good:.1f} a second within {TTFT_MS} ms")
            if good < 0.7 * rate or rate > 200:
                break
            rate *= 2
        out, good = load(c, 10 * peak, seconds)
    finally:
        c.stop()
    refused = sorted(o[1] for o in out if o[0] == 429)
    failed = [o for o in out if o[0] not in (200, 429)]
    print(f"rate {10 * peak:.1f}: {good:.1f} a second, {len(refused)} of {len(out)} refused, {len(failed)} failed; load average "
          f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if not refused:
        sys.exit("nobody was refused")
    p50, p99 = refused[len(refused) // 2], refused[int(0.99 * (len(refused) - 1))]
    print(f"bench,overload_refusal_p50,{p50:.1f},ms,aim 100,{p50 / 100:.2f}")
    print(f"bench,overload_refusal_p99,{p99:.1f},ms,aim 100,{p99 / 100:.2f}")
    print(f"bench,overload_goodput,{good:.1f},requests/s,peak,{good / peak:.2f}")


main()

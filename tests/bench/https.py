#!/usr/bin/python3
"""What HTTPS costs a conductor: two local clusters with `null` engines and TLS between daemons, one with HTTPS and one
with HTTP, take turns.
Small requests over standing connections, small requests over a new connection each, and event streams: rate, and CPU of
the conductor for one of them. The client (Python) is the slower part, so the conductor's CPU is the figure to compare.
Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO."""
import json
import os
import statistics
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
from local_cluster import Cluster  # noqa: E402

CLIENTS, SECONDS, ROUNDS, TOKENS = 8, 2.0, 5, 256
OPTIONS = [x for role in ("prefill", "decode") for kv in ("device=null", "mem=256MiB") for x in ("--set", f"{role}.engine.{kv}")]
ONE = {"prompt": [5, 6, 7], "max_tokens": 1}
MANY = dict(ONE, max_tokens=TOKENS, ignore_eos=True, stream=True)


def cpu_s(c):
    with open(f"/proc/{c.daemon('conductor')['pid']}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def client(c, body, new, until, counts):
    n, conn, data = 0, c.connect(), json.dumps(body)
    while time.monotonic() < until:
        conn.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        r = conn.getresponse()
        text = r.read()
        assert r.status == 200, text
        n += text.count(b"data: {") if body.get("stream") else 1
        if new:
            conn.close()
            conn = c.connect()
    conn.close()
    counts.append(n)


def run(c, body, new):
    """(a second, microseconds of the conductor's CPU each)"""
    counts, before, start = [], cpu_s(c), time.monotonic()
    threads = [threading.Thread(target=client, args=(c, body, new, start + SECONDS, counts)) for _ in range(CLIENTS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(counts) == CLIENTS
    return sum(counts) / (time.monotonic() - start), (cpu_s(c) - before) * 1e6 / sum(counts)


def main():
    plain = Cluster("--tls", "--set", "conductor.conductor.http.tls=", *OPTIONS)
    secure = Cluster("--tls", *OPTIONS)
    try:
        for name, body, new in (("requests", ONE, False), ("new_connections", ONE, True), ("tokens", MANY, False)):
            runs = {"http": [], "https": []}
            for _ in range(ROUNDS):
                for kind, c in (("http", plain), ("https", secure)):
                    runs[kind].append(run(c, body, new))
            rate, cpu = ({k: statistics.median(r[i] for r in v) for k, v in runs.items()} for i in (0, 1))
            for kind in runs:
                spread = sorted(r[1] for r in runs[kind])
                print(f"{name} {kind}: {rate[kind]:.0f}/s, conductor {cpu[kind]:.0f} us each ({spread[0]:.0f} to {spread[-1]:.0f})")
            print(f"bench,https_{name},{rate['https']:.0f},1/s,http,{rate['https'] / rate['http']:.2f}")
            print(f"bench,https_{name}_cpu,{cpu['https']:.1f},us,http,{cpu['https'] / cpu['http']:.2f}")
    finally:
        secure.stop()
        plain.stop()


if __name__ == "__main__":
    main()

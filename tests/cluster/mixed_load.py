#!/usr/bin/python3
"""A mixed load on small clusters, one with the cpu engine and one with the null engine, each with SSD tiers that are in use:
for an instrumented build (make tsan). Prompts are computed, found again, written to the SSD, evicted and read back; answers
are streamed and whole; clients leave; prompts that no slab holds pass through (null engine); metrics and batonctl are asked. Every answer
must equal its first. Reports are printed by kind, with their number; exit 1 if there is any.

    tests/cluster/mixed_load.py [SECONDS]       (BUILD: the build directory)
"""
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.dont_write_bytecode = True
sys.path.insert(0, HERE)
os.environ["PATH"] = os.path.join(ROOT, "build", "third", "etcd", "usr", "bin") + ":" + os.environ["PATH"]
import sanitizer  # noqa: E402
from local_cluster import BIN, scrape  # noqa: E402
from nth_rounds import Nth  # noqa: E402

ENGINES = {"cpu": (), "null": ("--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")}


LONG = {"cpu": 800, "null": 5000}  # tokens of prompts; the slab holds some 4,000


def leaver(run, over, engine):
    """Clients that leave in the middle, and long prompts."""
    i = 0
    while not over():
        i += 1
        body = {"prompt": [300 + (i * 7 + j) % 1000 for j in range(20 if i % 3 else LONG[engine])], "max_tokens": 200 if i % 3 else 4,
                "stream": True, "ignore_eos": True}
        c = http.client.HTTPConnection("127.0.0.1", run.port, timeout=60 * sanitizer.PATIENCE)
        try:
            c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            r = c.getresponse()
            r.read(200 if i % 3 else None)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            c.close()
        time.sleep(0.2)


def watcher(run, over, _):
    """Who operates it: metrics of every daemon, batonctl."""
    with open(os.path.join(run.c.state_dir, "conductor.addr")) as f:
        addr = f.read().strip()
    while not over():
        for d in run.c.status():
            if d["daemon"] != "etcd":
                scrape(d["http"])
        for what in "nodes", "requests", "blocks", "status":
            subprocess.run([os.path.join(BIN, "batonctl"), "--addr", addr, what], stdout=subprocess.DEVNULL,
                           timeout=60 * sanitizer.PATIENCE)
        time.sleep(0.5)


def load(engine, seconds):
    run = Nth(shimmed=False, options=ENGINES[engine])
    out = dict(right=0, unserved=0, wrong=[], last="")
    try:
        begun = time.monotonic()

        def over():
            return time.monotonic() - begun > seconds

        others = [threading.Thread(target=f, args=(run, over, engine)) for f in (leaver, watcher)]
        for t in others:
            t.start()
        run.load(over, out)
        for t in others:
            t.join()
        kvstore = run.c.metrics("kvstore")
        print(f"{engine}: {out['right']} right, {len(out['wrong'])} wrong, {out['unserved']} not served {out['last'][:200]};"
              f" SSD written {kvstore['baton_ssd_written_bytes_total']:.0f}, read {kvstore['baton_ssd_read_bytes_total']:.0f} bytes", flush=True)
    finally:
        run.stop()
    return out["wrong"]


def kinds(text):
    """Reports by their summary line."""
    return Counter(line.split("SUMMARY: ")[1] for line in text.splitlines() if "SUMMARY: " in line)


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    sanitizer.start()
    wrong = [w for engine in ENGINES for w in load(engine, seconds)]
    reports = sanitizer.take_reports(1 << 20)
    print("\n".join(wrong[:5]))
    print(reports[:20000])
    for kind, n in kinds(reports).most_common():
        print(f"{n} times {kind}")
    print(f"{len(wrong)} wrong answers, {sum(kinds(reports).values())} reports")
    return 1 if wrong or reports else 0


if __name__ == "__main__":
    sys.exit(main())

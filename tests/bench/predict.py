#!/usr/bin/python3
"""Predictions against what happened, live: a local CPU cluster of two prefill and two decode workers serves a scaled
part of a trace, open loop; each answer brings its plan (x-baton-plan).
predict.py [TRACE.jsonl [REQUESTS [SECONDS [paced [baton-local options]]]]]

A block of 512 tokens of the trace becomes one of 16 here, with the same sharing; arrivals are stretched so that the
part takes SECONDS. paced: the engine is `null`, at the CPU engine's pace but without its use of the cores, so that what
is wrong is the conductor's and not the neighbours' doing. Ends in bench lines: median and 90th percentile of the relative errors of TTFT and TBT. Says
nothing on a machine that others use: the load average stands in the output."""
import json
import os
import random
import statistics
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from conftest import ROOT, Cluster  # noqa: E402

SCALE = 32
PACE = "500,45"


def prompt_of(rec):
    """Token ids: each block's are drawn from its hash, so equal prefixes stay equal."""
    n, ids = max(2, rec["input_length"] // SCALE), []
    for h in rec["hash_ids"]:
        r = random.Random(h)
        ids += [r.randrange(300, 1500) for _ in range(512 // SCALE)]
    while len(ids) < n:
        ids.append(300 + len(ids) % 1000)
    return ids[:n]


def main():
    trace = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "tests", "sim", "small.jsonl")
    wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60
    with open(trace) as f:
        trace = [json.loads(line) for line in f][:wanted]
    first = trace[0]["timestamp"]
    stretch = seconds * 1e3 / max(1, trace[-1]["timestamp"] - first)
    more, name = sys.argv[4:], "predict"
    if more and more[0] == "paced":
        os.environ["BATON_NULL_PACE"] = PACE
        more, name = more[1:], "predict_paced"
        more += [x for role in ("prefill", "decode") for x in ("--set", f"{role}.engine.device=null")]
    c = Cluster("--nodes", "2", "--prefill", "2", "--decode", "2", *more)
    plans, lock = [], threading.Lock()

    def one(rec):
        try:
            status, _, data = c.request("POST", "/v1/completions", {
                "prompt": prompt_of(rec), "max_tokens": max(2, min(64, rec["output_length"] // 8)), "temperature": 0,
                "ignore_eos": True}, {"x-baton-plan": "1"})
            p = json.loads(data)["plan"] if status == 200 else None
        except Exception as e:  # counted as a failure
            p = None
            print("failed:", e, file=sys.stderr)
        with lock:
            plans.append(p)

    try:
        limit = c.request("GET", "/v1/models")[2]
        longest = json.loads(limit)["data"][0].get("max_model_len", 1024) - 70
        trace = [r for r in trace if r["input_length"] // SCALE < longest]
        start, threads = time.monotonic(), []
        for i, rec in enumerate(trace):
            at = (rec["timestamp"] - first) * stretch / 1e3 + i * 1e-3  # the trace's ticks hold many at once
            time.sleep(max(0, start + at - time.monotonic()))
            threads.append(threading.Thread(target=one, args=(rec,)))
            threads[-1].start()
        for t in threads:
            t.join()
    finally:
        c.stop()
    good = [p for p in plans if p is not None and p["replans"] == 0]
    print(f"{len(trace)} requests, {len(plans) - len([p for p in plans if p])} failed, {len(good)} as planned; load average {os.getloadavg()[0]:.1f} "
          f"on {os.cpu_count()} cores")
    warm = good[len(good) // 5:]  # learning takes some requests
    for what in ("ttft_ms", "tbt_ms"):
        pairs = [(p["predicted"][what], p["actual"][what]) for p in warm
                 if (p["predicted"][what] or -1) > 0 and (p["actual"][what] or -1) > 0]
        errors = sorted(abs(a - b) / b for a, b in pairs)
        if not errors:
            sys.exit(f"no request had a {what}")
        med, p90 = statistics.median(errors), errors[int(0.9 * (len(errors) - 1))]
        print(f"{what}: predicted median {statistics.median(a for a, _ in pairs):.2f}, actual "
              f"{statistics.median(b for _, b in pairs):.2f}; error median {100 * med:.0f} %, p90 {100 * p90:.0f} %")
        print(f"bench,{name}_{what[:-3]}_error_median,{100 * med:.1f},%,aim 15,{med / 0.15:.2f}")
        print(f"bench,{name}_{what[:-3]}_error_p90,{100 * p90:.1f},%,aim 40,{p90 / 0.40:.2f}")


main()

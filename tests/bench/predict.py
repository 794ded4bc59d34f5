#!/usr/bin/python3
"""Predictions against what happened, live: a local CPU cluster of two prefill and two decode workers serves a scaled
part of a trace, open loop; each answer brings its plan (x-baton-plan).
predict.py [--csv FILE] [TRACE.jsonl [REQUESTS [SECONDS [paced[=STEP_US,TOKEN_US] [baton-local options]]]]]

A block of 512 tokens of the trace becomes one of 16 here, with the same sharing; arrivals are stretched so that the
part takes SECONDS. paced: the engine is `null`, at the CPU engine's pace but without its use of the cores, so that what
is wrong is the conductor's and not the neighbours' doing; steps longer than the default (500,45) stand out of the noise
of a machine that others use. BATON_PREFIX=DIR: of an installation or an unpacked bundle instead of the build tree. --csv: each request's parts, predicted and actual. Ends in bench lines: median and 90th percentile of the relative errors of TTFT and TBT. Says
nothing on a machine that others use: the load average stands in the output."""
import csv
import json
import os
import random
import statistics
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from local_cluster import ROOT, Cluster  # noqa: E402

SCALE = 32  # so many of the trace's tokens are one of ours
PACE = "500,45"


def load(path, wanted):
    with open(path) as f:
        return [json.loads(line) for line in f][:wanted]


def prompt_of(rec, scale):
    """Token ids: each block's are drawn from its hash, so equal prefixes stay equal."""
    n, ids = max(2, rec["input_length"] // scale), []
    for h in rec["hash_ids"]:
        r = random.Random(h)
        ids += [r.randrange(300, 1500) for _ in range(512 // scale)]
    while len(ids) < n:
        ids.append(300 + len(ids) % 1000)
    return ids[:n]


def error_of(pairs):
    """Median and 90th percentile of |predicted - actual| / actual."""
    errors = sorted(abs(a - b) / b for a, b in pairs)
    return statistics.median(errors), errors[int(0.9 * (len(errors) - 1))]


def parts(p, which):
    """The first token's time: until its prompt's first step, its steps, and all after the last of them."""
    x = p[which]
    if None in (x["ttft_ms"], x["queue_ms"], x["prefill_ms"]):
        return None
    return {"queue": x["queue_ms"], "prefill": x["prefill_ms"], "rest": x["ttft_ms"] - x["queue_ms"] - x["prefill_ms"]}


def write_csv(path, plans):
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        keys = ("cached_tokens", "ttft_ms", "queue_ms", "prefill_ms", "tbt_ms")
        out.writerow(["at_s", "prompt_tokens", "tokens", "prefill", "decode", *(f"{w}_{k}" for w in ("predicted", "actual") for k in keys)])
        for at, n, tokens, p in plans:
            out.writerow([f"{at:.3f}", n, tokens, p["prefill"], p["decode"], *(p[w][k] for w in ("predicted", "actual") for k in keys)])


def replay(c, trace, seconds, scale=SCALE, shorter=8, longest_answer=64):
    """Sends the trace's requests to cluster c within so many seconds, answers so many times shorter. Returns for each:
    when, tokens of the prompt and asked for, the plan with what came of it (None: it failed)."""
    plans, lock = [], threading.Lock()

    def one(rec, at):
        tokens = max(2, min(longest_answer, rec["output_length"] // shorter))
        try:
            status, _, data = c.request("POST", "/v1/completions", {
                "prompt": rec["prompt"], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}, {"x-baton-plan": "1"})
            p = json.loads(data)["plan"] if status == 200 else None
        except Exception as e:  # counted as a failure
            p = None
            print("failed:", e, file=sys.stderr)
        with lock:
            plans.append((at, len(rec["prompt"]), tokens, p))

    limit = c.request("GET", "/v1/models")[2]
    longest = json.loads(limit)["data"][0].get("max_model_len", 1024) - longest_answer - 6
    first = trace[0]["timestamp"]
    stretch = seconds * 1e3 / max(1, trace[-1]["timestamp"] - first)
    trace = [dict(r, prompt=prompt_of(r, scale)) for r in trace if r["input_length"] // scale < longest]
    start, threads = time.monotonic(), []
    for i, rec in enumerate(trace):
        at = (rec["timestamp"] - first) * stretch / 1e3 + i * 1e-3  # the trace's ticks hold many at once
        time.sleep(max(0, start + at - time.monotonic()))
        threads.append(threading.Thread(target=one, args=(rec, at)))
        threads[-1].start()
    for t in threads:
        t.join()
    return sorted(plans, key=lambda x: x[0])


def report(plans, name, path=None):
    """Prints parts and errors, and their bench lines; path: a CSV of each request's parts."""
    good = [x for x in plans if x[3] is not None and x[3]["replans"] == 0]
    print(f"{len(plans)} requests, {len([x for x in plans if x[3] is None])} failed, {len(good)} as planned; load average "
          f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if path:
        write_csv(path, good)
    warm = [x[3] for x in good[len(good) // 5:]]  # learning takes some requests
    split = [(a, b) for a, b in ((parts(p, "predicted"), parts(p, "actual")) for p in warm) if a and b]
    for k in ("queue", "prefill", "rest"):
        off = sorted(a[k] - b[k] for a, b in split)
        print(f"  {k}: predicted mean {statistics.mean(a[k] for a, _ in split):.1f} ms, actual {statistics.mean(b[k] for _, b in split):.1f}; "
              f"off by {off[len(off) // 10]:+.1f} / {statistics.median(off):+.1f} / {off[len(off) * 9 // 10]:+.1f} (p10, p50, p90)")
    for what in ("ttft_ms", "tbt_ms"):
        pairs = [(p["predicted"][what], p["actual"][what]) for p in warm
                 if (p["predicted"][what] or -1) > 0 and (p["actual"][what] or -1) > 0]
        if not pairs:
            sys.exit(f"no request had a {what}")
        med, p90 = error_of(pairs)
        print(f"{what}: predicted median {statistics.median(a for a, _ in pairs):.2f}, actual "
              f"{statistics.median(b for _, b in pairs):.2f}; error median {100 * med:.0f} %, p90 {100 * p90:.0f} %")
        print(f"bench,{name}_{what[:-3]}_error_median,{100 * med:.1f},%,aim 15,{med / 0.15:.2f}")
        print(f"bench,{name}_{what[:-3]}_error_p90,{100 * p90:.1f},%,aim 40,{p90 / 0.40:.2f}")


def main():
    path = None
    if len(sys.argv) > 2 and sys.argv[1] == "--csv":
        path = sys.argv[2]
        del sys.argv[1:3]
    trace = load(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "tests", "sim", "small.jsonl"),
                 int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60
    more, name, engine = sys.argv[4:], "predict", "threads=1"  # four workers on few cores
    if more and more[0].split("=")[0] == "paced":
        os.environ["BATON_NULL_PACE"] = more[0].partition("=")[2] or PACE
        more, name, engine = more[1:], "predict_paced", "device=null"
    more = [x for role in ("prefill", "decode") for x in ("--set", f"{role}.engine.{engine}")] + more
    c = Cluster("--nodes", "2", "--prefill", "2", "--decode", "2", *more)
    try:
        plans = replay(c, trace, seconds)
    finally:
        c.stop()
    report(plans, name, path)


if __name__ == "__main__":
    main()

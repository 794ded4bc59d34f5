#!/usr/bin/python3
"""Does the order of the policies in simulation hold live? A part of a trace, scaled, is replayed against a local CPU
cluster of 2 prefill and 2 decode workers on 4 nodes under each policy, and simulated for the same cluster with costs
measured on it. order.py [TRACE [REQUESTS [SECONDS [cpu|paced [ROUNDS]]]]]

TRACE: a Mooncake .jsonl (tests/sim/small.jsonl, in which much is shared). A token of the trace is 1/16 here. The part is
made so fast that two prefill workers without caches would have 1.2 times what they can do, but takes SECONDS at most.
The model has random weights of a 124M Llama's shape, so that computing costs what it would. Four workers on few cores
hold each other up, which the simulator does not know: costs are measured with both prefill workers computing and rows in
both decode workers. paced: the engine is `null`, each worker at a pace of its own as if it had a device, the model the
6M one: then policies are compared, and not what a machine's cores do to each other. ROUNDS in turns show what a
machine's noise is. Takes about a minute for each policy and round."""
import csv
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(HERE, "..", "cluster"))
import traces  # noqa: E402
from local_cluster import Cluster  # noqa: E402
from prefix import make_model  # noqa: E402

POLICIES = ("random", "least-load", "cache-aware", "kvcache", "baton")
SCALE, OUT_SCALE, LOAD = 1 / 16, 1 / 32, 1.2
PACE = "10000,400"  # us a step and a token
PACED = len(sys.argv) > 4 and sys.argv[4] == "paced"
IDS = (300, 1500)
LONGEST = 1900
SIM = os.path.join(ROOT, os.environ.get("BUILD", "build"), "bin", "baton-sim")


SLAB = 768 * 2 ** 20


def start(model, policy):
    engine = ("device=null",) if PACED else ("threads=1",)
    return Cluster("--nodes", "4", "--prefill", "2", "--decode", "2", "--model", model, "--load-format", "dummy",
                   *(x for role in ("prefill", "decode") for k in engine for x in ("--set", f"{role}.engine.{k}")),
                   "--set", f"kvstore.kvstore.slab_bytes={SLAB}", "--set", f"conductor.sched.policy={policy}", "--set",
                   "conductor.sched.admission=none")


def token_bytes(model):
    """KV of a token: layers, K and V, heads, their size, bf16."""
    with open(os.path.join(model, "config.json")) as f:
        c = json.load(f)
    heads = c["num_attention_heads"]
    return c["num_hidden_layers"] * 2 * c.get("num_key_value_heads", heads) * c.get("head_dim", c["hidden_size"] // heads) * 2


def ask(c, prompt, n):
    """(ms to the first token, median ms between tokens)"""
    k = http.client.HTTPConnection(c.host, c.port, timeout=120)
    begin = time.monotonic()
    k.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True,
                                                     "stream": True}), {"Content-Type": "application/json"})
    answer, times = k.getresponse(), []
    while line := answer.readline():
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    k.close()
    gaps = [(b - a) * 1e3 for a, b in zip(times, times[1:-1])]
    return (times[0] - begin) * 1e3, statistics.median(gaps) if gaps else 0


def at_once(n, fn):
    """What fn(i) gave for each i below n, all of them together."""
    got = [None] * n

    def one(i):
        got[i] = fn(i)
    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return got


class Costs:
    """Fitted to a few requests: prefill = base + token n + attn n^2 / 2, step = base + kv context + row rows. Two of them
    at a time, one for each worker of a role, beside two that decode unless the workers are paced."""

    def __init__(self, c):
        rng, over = random.Random(time.time()), threading.Event()

        def ids(n):
            return [rng.randrange(*IDS) for _ in range(n)]

        def neighbour():
            while not over.is_set():
                ask(c, ids(64), 64)
        rows = [threading.Thread(target=neighbour) for _ in range(0 if PACED else 2)]
        for t in rows:
            t.start()
        try:
            self.measure(c, ids)
        finally:
            over.set()
            for t in rows:
                t.join()

    def measure(self, c, ids):
        pair = 1 if PACED else 2
        for _ in range(4):
            ask(c, ids(400), 2)  # both have measured something
        x = (128, 896, 1792)
        y = [statistics.median(v for _ in range(4) for v, _ in at_once(pair, lambda i, n=n: ask(c, ids(n), 1))) for n in x]
        # Newton's form of the parabola through three points
        d1, d2 = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
        a = max(0.0, (d2 - d1) / (x[2] - x[0]))
        b = (y[2] - y[0]) / (x[2] - x[0]) - a * (x[2] + x[0])
        self.token_ms, self.attn_ms = max(b, 1e-3), 2 * a
        self.base_ms = max(0.0, statistics.mean(v - self.token_ms * n - a * n * n for n, v in zip(x, y)))
        short, long = (statistics.median(ask(c, ids(n), 24)[1] for _ in range(3)) for n in (64, 1600))
        gaps = [g for _, g in at_once(8, lambda i: ask(c, ids(64), 48))]
        self.step_ms, self.kv_ms = short, max(0.0, (long - short) / 1536)
        self.row_ms = max(0.0, (statistics.median(gaps) - short) / 3)  # four rows on each of two workers

    def prefill_ms(self, n):
        return self.base_ms + self.token_ms * n + self.attn_ms * n * n / 2

    def cluster(self, path, token_bytes):
        """In tokens of the trace."""
        with open(path, "w") as f:
            for key, value in (
                    ("prefill_nodes", 2), ("decode_nodes", 2), ("prefill_base_ns", self.base_ms * 1e6),
                    ("prefill_token_ns", self.token_ms * 1e6 * SCALE), ("prefill_attn_ns", self.attn_ms * 1e6 * SCALE ** 2),
                    ("decode_base_ns", max(1.0, self.step_ms * 1e6)), ("decode_kv_ns", self.kv_ms * 1e6 * SCALE),
                    ("decode_token_ns", self.row_ms * 1e6), ("chunk_tokens", 8192 / SCALE), ("token_bytes", token_bytes * SCALE),
                    ("layers", 12), ("link_bytes_per_s", 1e9), ("load_bytes_per_s", 1e10),
                    ("cache_tokens", SLAB / token_bytes / SCALE), ("kv_tokens", 1e6), ("rows_max", 64)):
                f.write(f"{key}: {value:.6f}\n")


def live(policy, model, part, speed, folder, first):
    c = start(model, policy)
    try:
        costs = Costs(c) if first else None
        if first:
            speed = speed(costs)
        rng = random.Random(time.time())
        for _ in range(4):
            ask(c, [rng.randrange(*IDS) for _ in range(400)], 2)
        out = os.path.join(folder, policy + ".csv")
        p = subprocess.run([os.path.join(HERE, "baton-bench"), "serve", "--url", c.url, "--trace", part, "--speed", str(speed),
                            "--length-scale", str(SCALE), "--output-scale", str(OUT_SCALE), "--ids", "%d:%d" % IDS, "--csv", out],
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if p.returncode != 0:
            sys.exit(f"order.py: {policy}: {p.stdout.decode()}{p.stderr.decode()}")
        with open(out) as f:
            rows = [r for r in csv.DictReader(f) if not r["error"]]
        prompt, cached = sum(int(r["prompt_tokens"]) for r in rows), sum(int(r["cached_tokens"] or 0) for r in rows)
        return statistics.mean(float(r["ttft_ms"]) for r in rows), cached / prompt, speed, costs
    finally:
        c.stop()


def simulated(policy, cluster, part, speed):
    """Means over seeds: live, too, ties fall as they do."""
    runs = []
    for seed in range(1, 10):
        p = subprocess.run([SIM, "run", "--cluster", cluster, "--trace", part, "--rate", str(speed), "--policy", policy, "--admission", "none", "--mixed-step",
                            "0", "--seed", str(seed), "--brief"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if p.returncode != 0:
            sys.exit(f"order.py: {p.stderr.decode()}")
        runs.append(dict(w.split("=") for w in p.stdout.decode().split()))
    return tuple(statistics.mean(float(r[k]) for r in runs) * s for k, s in (("ttft_mean_s", 1e3), ("hit", 1)))


def main():
    trace = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "tests", "sim", "small.jsonl")
    wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 35
    try:
        requests = [q for q in traces.load(trace) if q.input * SCALE <= LONGEST][:wanted]
    except traces.Bad as e:
        sys.exit(f"order.py: {e}")
    span_ms = requests[-1].at_ms - requests[0].at_ms
    folder = tempfile.mkdtemp(prefix="baton-order-")
    part = os.path.join(folder, "part.jsonl")
    with open(part, "w") as f:
        for q in requests:
            f.write(json.dumps({"timestamp": q.at_ms, "input_length": q.input, "output_length": q.output, "hash_ids": q.blocks}) + "\n")
    sim_part = os.path.join(folder, "sim.jsonl")
    with open(sim_part, "w") as f:
        for q in requests:
            f.write(json.dumps({"timestamp": q.at_ms, "input_length": q.input, "output_length": max(1, round(q.output * OUT_SCALE)),
                                "hash_ids": q.blocks}) + "\n")

    def speed_of(costs):
        """Two prefill workers that find nothing cached are busy for LOAD of the time."""
        work = sum(costs.prefill_ms(q.input * SCALE) for q in requests) / 2
        return max(span_ms * LOAD / work, span_ms / (seconds * 1e3))
    try:
        model = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m") if PACED else make_model(folder)
        os.environ["BATON_NULL_PACE"] = PACE
        got, speed, costs = {}, speed_of, None
        runs = {p: [] for p in POLICIES}
        for policy in POLICIES * (int(sys.argv[5]) if len(sys.argv) > 5 else 1):
            ttft, hit, speed, c = live(policy, model, part, speed, folder, costs is None)
            runs[policy].append((ttft, hit))
            costs = costs or c
            if c:
                print(f"prefill {c.base_ms:.1f} ms + {c.token_ms:.3f} ms a token + {1e6 * c.attn_ms:.0f} ns a pair; step {c.step_ms:.2f} ms + "
                      f"{1e3 * c.kv_ms:.2f} us a token of context + {c.row_ms:.2f} ms a row; the trace runs {speed:.2f} times as fast, "
                      f"{span_ms / 1e3 / speed:.0f} s", flush=True)
                c.cluster(os.path.join(folder, "cluster"), token_bytes(model))
            got[policy] = (*(statistics.mean(x) for x in zip(*runs[policy])),
                           *simulated(policy, os.path.join(folder, "cluster"), sim_part, speed))
            print(f"{policy}: live mean TTFT {ttft:.0f} ms, {100 * hit:.1f} % cached; simulated {got[policy][2]:.0f} ms, "
                  f"{100 * got[policy][3]:.1f} %; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    pairs = [(a, b) for i, a in enumerate(POLICIES) for b in POLICIES[i + 1:]]
    clear = [(a, b) for a, b in pairs if abs(got[a][2] - got[b][2]) > 0.1 * min(got[a][2], got[b][2])]
    same = [(a, b) for a, b in clear if (got[a][0] - got[b][0]) * (got[a][2] - got[b][2]) > 0]
    for a, b in set(clear) - set(same):
        print(f"simulated {a} {got[a][2]:.0f} and {b} {got[b][2]:.0f} ms, live {got[a][0]:.0f} and {got[b][0]:.0f} ms: another order")
    for p in POLICIES:
        each = " ".join(f"{t:.0f}" for t, _ in runs[p])
        print(f"bench,order_{p},{got[p][0]:.1f},ms,simulated {got[p][2]:.1f} (runs: {each}),{got[p][0] / got[p][2]:.3f}")
    order = sum(1 if (got[a][0] - got[b][0]) * (got[a][2] - got[b][2]) > 0 else -1 for a, b in pairs)
    print(f"bench,order_kendall,{order / len(pairs):.2f},tau,1 is the same order,{order / len(pairs):.2f}")
    print(f"bench,order_pairs,{len(same)},pairs in the same order,of {len(clear)} that differ by a tenth in simulation,"
          f"{len(same) / max(1, len(clear)):.3f}")


if __name__ == "__main__":
    main()

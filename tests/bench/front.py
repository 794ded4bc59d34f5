#!/usr/bin/python3
"""The front and the path to the workers and back, with the `null` engine (it computes nothing) in the
whole local cluster of two nodes: tokens a second over 256 SSE streams with the CPU each daemon spends
a token, and what one stream waits for its first token and between two. Since the engine's own share is
almost nothing, the latter are the path's. Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO."""
import json
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
from local_cluster import BUILD, Cluster  # noqa: E402

STREAMS, TOKENS, PROMPT, LONG, REQUESTS, ROUNDS = 256, 512, 64, 2048, 2, 5
NEED_RATE, NEED_TTFT_MS, NEED_TOKEN_MS = 20000, 3.0, 0.3
OPTIONS = [x for role in ("prefill", "decode")
           for kv in ("device=null", f"max_slots={STREAMS}", "mem=1GiB")
           for x in ("--set", f"{role}.engine.{kv}")]
OPTIONS += ["--set", "conductor.conductor.max_running=512"]


def cpu_s(pid):
    """(user, system) seconds of a process so far."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    hz = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / hz, int(fields[12]) / hz


def load(c, *args):
    p = subprocess.run([os.path.join(BUILD, "tests", "tools", "sse_load"), f"{c.host}:{c.port}",
                        *map(str, args)], stdout=subprocess.PIPE, timeout=300)
    out = json.loads(p.stdout.decode().splitlines()[-1])
    assert p.returncode == 0, out
    return out


def throughput(c, vocab, *more):
    """One run; adds microseconds of CPU a token of each daemon, (user, system)."""
    pids = {f"{d['daemon']}-{d['node']}": d["pid"] for d in c.status() if d["daemon"] != "etcd"}
    before = {k: cpu_s(p) for k, p in pids.items()}
    out = load(c, STREAMS, TOKENS, PROMPT, REQUESTS, vocab, *more)
    n = out["tokens"]
    out["cpu"] = {k: tuple((a - b) * 1e6 / n for a, b in zip(cpu_s(p), before[k]))
                  for k, p in pids.items()}
    out["cpu"]["client"] = (out["cpu_user_s"] * 1e6 / n, out["cpu_sys_s"] * 1e6 / n)
    out["rate"] = n / out["all_s"]
    return out


def main():
    c = Cluster(*OPTIONS)
    try:
        vocab = 2000
        load(c, 16, 64, PROMPT, 1, vocab)
        throughput(c, vocab, "order")  # every stream's tokens in order, counted by the server
        runs = sorted((throughput(c, vocab) for _ in range(ROUNDS)), key=lambda r: r["rate"])
        single = [load(c, 1, 256, PROMPT, 1, vocab) for _ in range(40)][8:]
        long = [load(c, 1, 2, LONG, 1, vocab) for _ in range(40)][8:]
    finally:
        c.stop()
    mid = runs[ROUNDS // 2]
    print(f"{STREAMS} streams, {REQUESTS} requests of {TOKENS} tokens each: tokens/s "
          + " ".join(f"{r['rate']:.0f}" for r in runs))
    print(f"TTFT p50 {mid['ttft_us']['p50'] / 1e3:.1f} ms, gap p50 {mid['gap_us']['p50'] / 1e3:.2f} "
          f"p99 {mid['gap_us']['p99'] / 1e3:.2f} ms, {mid['joined'] * 100 // mid['tokens']} % of the "
          "tokens came with another of their stream")
    total = 0
    for name, (user, system) in sorted(mid["cpu"].items()):
        total += user + system
        print(f"CPU a token: {name:20} {user:6.2f} us user {system:6.2f} us system")
    ttft = statistics.median(r["ttft_us"]["p50"] for r in single) / 1e3
    ttft_long = statistics.median(r["ttft_us"]["p50"] for r in long) / 1e3
    token = statistics.median(r["stream_s"] / (r["tokens"] - 1) for r in single) * 1e3
    rate = mid["rate"]
    print(f"all together {total:.1f} us a token; two cores give {2e6 / total:.0f} tokens/s")
    print(f"bench,front_tokens_per_s,{rate:.0f},1/s,target {NEED_RATE},{rate / NEED_RATE:.2f}")
    conductor = sum(sum(v) for k, v in mid["cpu"].items() if k.startswith("conductor"))
    print(f"bench,front_conductor_cpu_per_token,{conductor:.2f},us,all daemons and the client "
          f"{total:.1f},{conductor / total:.2f}")
    print(f"bench,path_ttft,{ttft:.2f},ms,target {NEED_TTFT_MS},{ttft / NEED_TTFT_MS:.2f}")
    print(f"bench,path_ttft_prompt_{LONG},{ttft_long:.2f},ms,prompt of {PROMPT} {ttft:.2f},"
          f"{ttft_long / ttft:.2f}")
    print(f"bench,path_per_token,{token:.4f},ms,target {NEED_TOKEN_MS},{token / NEED_TOKEN_MS:.2f}")


if __name__ == "__main__":
    main()

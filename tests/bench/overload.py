#!/usr/bin/python3
"""Ten times more than the cluster can do: how soon refusals are answered, and what goodput is left against the best at
any load. overload.py [SECONDS [cpu [baton-local options]]]

The workers' engine is `null`, paced as a device of its own would be (40 us a token and 2 ms a step, without the
processor's help): with `cpu` the refusals' work, the load's and the model's share the same cores, and goodput falls by
what the first two take. The load is open, one connection a request, times from when a request was due. Ends in bench
lines; CPU of each daemon under overload stands above them."""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from local_cluster import BUILD, Cluster  # noqa: E402

TTFT_MS, TOKENS, PROMPT, VOCAB = 1000, 16, 256, 1500
PACE = "2000,40"


def load(c, rate, seconds):
    p = subprocess.run([os.path.join(BUILD, "tests", "tools", "open_load"), f"{c.host}:{c.port}",
                        *map(str, (rate, seconds, TOKENS, PROMPT, VOCAB, TTFT_MS))], stdout=subprocess.PIPE, check=True)
    out = json.loads(p.stdout.decode().splitlines()[-1])
    out["goodput"] = out["good"] / seconds
    return out


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15
    cpu = len(sys.argv) > 2 and sys.argv[2] == "cpu"
    options = ["--set", "conductor.sched.admission=predict", "--set", "conductor.max_waiting=64"]
    if not cpu:
        os.environ["BATON_NULL_PACE"] = PACE
        options += [x for role in ("prefill", "decode") for x in ("--set", f"{role}.engine.device=null")]
    c = Cluster(*options, *sys.argv[3:])
    try:
        load(c, 8, seconds / 2)  # learning
        peak, rate, behind = 0, 4.0, 0
        while behind < 2:  # what it can do: the rate grows until goodput does not follow, twice
            out = load(c, rate, seconds)
            peak = max(peak, out["goodput"])
            print(f"rate {rate:g}: {out['goodput']:.1f} a second within {TTFT_MS} ms, {out['late']} late, "
                  f"{out['refused']} refused", flush=True)
            behind = behind + 1 if out["goodput"] < 0.7 * rate else 0
            rate *= 1.5
        pids = {f"{d['daemon']}-{d['node']}": d["pid"] for d in c.status()}
        before = {k: cpu_s(p) for k, p in pids.items()}
        out = load(c, 10 * peak, seconds)
        used = {k: (cpu_s(p) - before[k]) / seconds for k, p in pids.items()}
    finally:
        c.stop()
    print(f"rate {10 * peak:.0f}: {out['goodput']:.1f} a second, {out['late']} late, {out['refused']} of {out['sent']} "
          f"refused ({out['no_retry_after']} without Retry-After), {out['failed']} failed; load average "
          f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("cores used: " + ", ".join(f"{k} {v:.2f}" for k, v in used.items()) + f", load {out['cpu_s'] / seconds:.2f}; "
          f"the load was late by p50 {out['lag_ms']['p50']:.1f}, p99 {out['lag_ms']['p99']:.1f} ms")
    if out["refused"] == 0:
        sys.exit("nobody was refused")
    r = out["refused_ms"]
    print(f"bench,overload_refusal_p50,{r['p50']:.1f},ms,aim 100,{r['p50'] / 100:.3f}")
    print(f"bench,overload_refusal_p99,{r['p99']:.1f},ms,aim 100,{r['p99'] / 100:.3f}")
    print(f"bench,overload_goodput,{out['goodput']:.1f},requests/s,peak,{out['goodput'] / peak:.3f}")


main()

#!/usr/bin/python3
"""Tables and plots of docs/SIMULATION.md and docs/measurements, by baton-sim. figures.py FIGURE TRACES [PLOTS]

FIGURE: ttft       mean TTFT by policy on conversation, 16 nodes (FAST'25, Figure 5)
        hits       hit ratio by policy, 10 prefill nodes of 3M tokens (FAST'25, Figure 10)
        admission  refusals at rising rates, and the two stages' loads over time (arXiv 2407.00079, section 7)
        goodput    baton against kvcache, at rates of the trace and at loads of the cluster
        ablation   baton without each of its ingredients
        tune       what the parameters were chosen by: the first halves
        split      goodput by how the nodes are split, on synthetic and, to the ends of it, on conversation
        ends       baton over kvcache by how the nodes are split, on all traces at overload
        late       what it takes to prefill prompts late without knowing which of them are used again, 1 s and 50 ms
        roles      goodput with roles by load, from splits that are wrong, and by day and night
        copies     copies of hot prefixes ahead of need: a trace of tools, by policy and budget
        tiers      hit ratio by tier with an SSD of so many times the slab
        all        all of them
TRACES: a folder with conversation_trace.jsonl, synthetic_trace.jsonl, azure_code.csv and azure_conv.csv (those that are
there are used). PLOTS: a folder for SVG files. Without arguments: goodput on the small trace of tests/sim.
"""
import datetime
import json
import os
import random
import re
import subprocess
import sys
import tempfile

import svg

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SIM = os.path.join(ROOT, os.environ.get("BUILD", "build"), "bin", "baton-sim")
CLUSTER = os.environ.get("CLUSTER", "a800-70b")
OBJECTIVES = ((30000, 100), (1000, 50))
KVCACHE = (("kvcache", "early"), ("kvcache", "predict"))
BATON = ["--policy", "baton", "--admission", "priced"]
BENCH = []


def sim(trace, *options):
    options = options if "--admission" in options else ("--admission", "none", *options)
    p = subprocess.run([SIM, "run", "--cluster", CLUSTER, "--trace", trace, "--brief", *map(str, options)],
                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if p.returncode != 0:
        sys.exit(f"figures.py: {p.stderr.decode().strip()}")
    return {k: float(v) for k, v in re.findall(r"(\w+)=(-?[0-9.]+)(?= |$)", p.stdout.decode())}


def name_of(trace):
    return re.sub(r"(_trace)?\.(jsonl|csv)$", "", os.path.basename(trace))


class Figures:
    def __init__(self, traces, plots):
        self.plots = plots
        self.files = [os.path.join(traces, f) for f in sorted(os.listdir(traces))
                      if f.endswith("_trace.jsonl") or re.match(r"azure_.*\.csv$", f) or f == "small.jsonl"]
        if not self.files:
            sys.exit(f"figures.py: {traces} has no trace; it should hold conversation_trace.jsonl and the like")

    def file(self, name):
        found = [f for f in self.files if name_of(f) == name]
        if not found:
            sys.exit(f"figures.py: there is no {name}_trace.jsonl among the traces")
        return found[0]

    def plot(self, name, panels):
        if self.plots:
            os.makedirs(self.plots, exist_ok=True)
            svg.write(os.path.join(self.plots, name), panels)

    # ---- the paper's figures ----

    def ttft(self):
        trace, bars = self.file("conversation"), []
        policies = (("random", 19.65), ("least-load", 5.27), ("cache-aware", 3.58), ("kvcache", 3.07))
        print("| | " + " | ".join(p for p, _ in policies) + " |\n|---|" + "---|" * len(policies))
        print("| published (FAST'25, Figure 5) | " + " | ".join(f"{s:.2f} s" for _, s in policies) + " |")
        print("| ... over global | " + " | ".join(f"{s / 3.07:.2f}" for _, s in policies) + " |")
        slow = ("--set", "prefill_token_ns=138000", "--set", "prefill_attn_ns=2.62")
        for what, options in (("ours", ()), ("ours, prefill a quarter slower", slow)):
            got = [sim(trace, "--policy", p, *options)["ttft_mean_s"] for p, _ in policies]
            print(f"| {what} | " + " | ".join(f"{s:.2f} s" for s in got) + " |")
            print("| ... over global | " + " | ".join(f"{s / got[-1]:.2f}" for s in got) + " |")
            bars = bars or got
        for (p, theirs), ours in zip(policies, bars):
            BENCH.append(f"figures_ttft_{p},{ours:.3f},s,published {theirs},{ours / theirs:.3f}")
        self.plot("ttft-policies.svg", [
            svg.Panel("Mean TTFT over that of global, published", "", "times", bars=[(p, round(s / 3.07, 2)) for p, s in policies], top=8),
            svg.Panel("... here", "", "times", bars=[(p, round(s / bars[-1], 2)) for (p, _), s in zip(policies, bars)], top=8)])

    def hits(self):
        policies, panels = ("random", "least-load", "cache-aware", "kvcache"), []
        print("| trace | eviction | " + " | ".join(policies) + " | one cache of 3M tokens | global over it |\n|---|---|"
              + "---|" * (len(policies) + 2))
        for name in ("conversation", "synthetic"):
            for eviction in ("lru", "density"):
                r = [sim(self.file(name), "--set", "prefill_nodes=10", "--set", "decode_nodes=6", "--one-token", "--policy", p,
                         "--eviction", eviction)["hit"] for p in policies]
                one = subprocess.run([SIM, "cache", "--trace", self.file(name), "--blocks", "5859", "--policy", eviction],
                                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode().splitlines()[1]
                one = float(one.split(",")[4])
                print(f"| {name} | {eviction} | " + " | ".join(f"{v:.3f}" for v in r) + f" | {one:.3f} | {r[-1] / one:.2f} |")
                published = {"conversation": 2.22, "synthetic": 2.36}[name]
                BENCH.append(f"figures_hits_{name}_{eviction},{r[-1] / one:.2f},times one cache,published {published},"
                             f"{r[-1] / one / published:.3f}")
            panels.append(svg.Panel(f"{name}: prompt tokens found (density)", "", "share", top=1,
                                    bars=[(p, round(v, 3)) for p, v in zip(policies, r)] + [("one cache", round(one, 3))]))
        self.plot("hits-policies.svg", panels)

    def admission(self):
        trace, rates, rows = self.file("conversation"), (1, 2, 3, 4, 6), {}
        options = ("--set", "prefill_nodes=14", "--set", "decode_nodes=2", "--tbt", 50)
        print("| rate | refused: late / early / predict | within both objectives | prefill wasted, late | deviation of the "
              "decode load, early / predict | its correlation with the prefill load |\n|---|---|---|---|---|---|")
        for rate in rates:
            r = {a: sim(trace, *options, "--admission", a, "--rate", rate) for a in ("late", "early", "predict")}
            rows[rate] = r
            refused = [sum(v for k, v in r[a].items() if k.startswith("refused_")) for a in r]
            print(f"| {rate} | " + " / ".join(f"{v:,.0f}" for v in refused) + " | " + " / ".join(f"{r[a]['good']:,.0f}" for a in r)
                  + f" | {r['late']['wasted_s']:,.0f} s | {r['early']['swing']:.3f} / {r['predict']['swing']:.3f} | "
                  + f"{r['early']['phase']:.2f} / {r['predict']['phase']:.2f} |")
            BENCH.append(f"figures_admission_swing_{rate},{r['predict']['swing']:.3f},of the TBT objective,early {r['early']['swing']:.3f},"
                         f"{r['predict']['swing'] / r['early']['swing']:.3f}")
        self.plot("admission.svg", [p for p in [
            svg.Panel("Requests within both objectives", "times the trace's rate", "requests",
                      [(a, [(x, rows[x][a]["good"]) for x in rates]) for a in ("late", "early", "predict")])]
            + [self.loads(trace, a, options) for a in ("early", "predict")] if p])

    def loads(self, trace, admission, options):
        """Both stages' loads over some minutes at four times the rate."""
        out = os.path.join(self.plots or "", "series.tmp")
        if not self.plots:
            return None
        sim(trace, *options, "--admission", admission, "--rate", 4, "--plot", out)
        with open(os.path.join(out, "series.csv")) as f:
            rows = [list(map(float, line.split(",")[:3])) for line in f.readlines()[1:]]
        for f in os.listdir(out):
            os.remove(os.path.join(out, f))
        os.rmdir(out)
        rows = [r for r in rows if 100e3 <= r[0] <= 700e3]
        return svg.Panel(f"Rate 4, admission {admission}", "s", "share of the objective",
                         [("prefill: queue / TTFT objective", [(r[0] / 1e3, r[1]) for r in rows]), ("", []),
                          ("decode: step / TBT objective", [(r[0] / 1e3, r[2]) for r in rows])])

    # ---- baton against kvcache ----

    def load_one(self, trace):
        """The rate at which kvcache still has 95 % of the first half within 30 s and 100 ms."""
        low, high = 0.25, 64.0
        while high / low > 1.02:
            rate = (low * high) ** 0.5
            r = sim(trace, "--to", 0.5, "--policy", "kvcache", "--admission", "early", "--rate", rate)
            n = r["served"] + sum(v for k, v in r.items() if k.startswith("refused_"))
            low, high = (rate, high) if r["good"] >= 0.95 * n else (low, rate)
        return float(f"{low:.3g}")

    def compare(self, trace, rate, ttft, tbt, half=("--from", 0.5)):
        common = [*half, "--rate", rate, "--ttft", ttft, "--tbt", tbt]
        kv = [sim(trace, *common, "--policy", p, "--admission", a) for p, a in KVCACHE]
        return max(kv, key=lambda r: r["good"]), sim(trace, *common, *BATON)

    def goodput(self):
        for ttft, tbt in OBJECTIVES:
            panels = []
            print(f"\nTTFT {ttft} ms, TBT {tbt} ms\n\n| trace | load | rate | kvcache | baton | ratio | at most | mean TTFT kvcache / baton |\n"
                  "|---|---|---|---|---|---|---|---|")
            for trace in self.files:
                one, lines = self.load_one(trace), {"kvcache": [], "baton": [], "at most": []}
                points = sorted([(x, f"{x / one:.2f}") for x in (0.5, 1, 2, 3)] + [(x * one, f"{x:g}") for x in (0.5, 1, 2, 3)])
                for rate, load in points:
                    kv, ours = self.compare(trace, rate, ttft, tbt)
                    ratio = ours["good"] / max(1, kv["good"])
                    print(f"| {name_of(trace)} | {load} | {rate:.3g} | {kv['good']:.0f} | {ours['good']:.0f} | {ratio:.3f} | "
                          f"{kv['bound']:.0f} | {kv['ttft_mean_s']:.2f} / {ours['ttft_mean_s']:.2f} s |")
                    BENCH.append(f"figures_goodput_{name_of(trace)}_{ttft}_{rate:.3g},{ours['good']:.0f},requests,kvcache "
                                 f"{kv['good']:.0f},{ratio:.3f}")
                    for label, v in (("kvcache", kv["good"]), ("baton", ours["good"]), ("at most", kv["bound"])):
                        lines[label].append((rate, v))
                panels.append(svg.Panel(f"{name_of(trace)}: within {ttft / 1000:g} s and {tbt} ms", "times the trace's rate",
                                        "requests", list(lines.items())))
            self.plot(f"goodput-{ttft // 1000}s.svg", panels)

    @staticmethod
    def halves(tbt):
        return ["--mixed-step", 0.5 * tbt, "--mixed-gap", 0]

    def ablation(self):
        without = (("all of it", []), ("no prompts beside rows", ["--mixed-step", 0]), ("rows spread", ["--pack", 0]),
                   ("steps of half the objective", self.halves), ("no price of work", ["--admission", "predict"]), ("no price by demand", ["--demand-price", 0]),
                   ("nothing late", ["--late-wait", 0]), ("no weight of others' time", ["--work-weight", 0]),
                   ("nothing fetched", ["--fetch-ratio", 0]))
        print("| trace, objectives | load | kvcache | " + " | ".join(n for n, _ in without) + " |\n|---|---|---|" + "---|" * len(without))
        for trace in self.files:
            one = self.load_one(trace)
            for ttft, tbt in OBJECTIVES:
                for load in (0.5, 1, 3):
                    common = ["--from", 0.5, "--rate", load * one, "--ttft", ttft, "--tbt", tbt]
                    kv = max(sim(trace, *common, "--policy", p, "--admission", a)["good"] for p, a in KVCACHE)
                    got = [sim(trace, *common, *BATON, *(options(tbt) if callable(options) else options))["good"] for _, options in without]
                    print(f"| {name_of(trace)}, {ttft / 1000:g} s | {load} | {kv:.0f} | " + " | ".join(f"{g:.0f}" for g in got) + " |")
                    for (what, _), g in zip(without[1:], got[1:]):
                        BENCH.append(f"figures_ablation_{name_of(trace)}_{ttft}_{load}_{what.replace(' ', '_').replace(chr(39), '')},"
                                     f"{g:.0f},requests,all of it {got[0]:.0f},{g / max(1, got[0]):.3f}")

    def tune(self):
        """The least and the mean ratio to kvcache over traces, objectives and loads, on the first halves."""
        choices = [("chosen", [])]
        choices += [(f"{name} {v}", [f"--{name}", v]) for name, values in (
            ("demand-price", (0.2, 0.8)), ("late-wait", (10000, 120000)), ("work-weight", (0, 1)))
            for v in values]
        choices += [("steps of half the objective", self.halves)]
        choices += [(f"steps of {x}", lambda tbt, x=x: ["--mixed-step", x * tbt]) for x in (0.6, 0.9)]
        loads = [(t, x * self.load_one(t), o) for t in self.files for x in (0.5, 1, 2, 3) for o in OBJECTIVES]
        best = [self.compare(t, rate, *o, half=("--to", 0.5))[0]["good"] for t, rate, o in loads]
        print("| parameters | least ratio to kvcache | mean |\n|---|---|---|")
        for what, options in choices:
            ratios = [sim(t, "--to", 0.5, "--rate", rate, "--ttft", o[0], "--tbt", o[1], *BATON,
                          *(options(o[1]) if callable(options) else options))["good"] / max(1, b)
                      for (t, rate, o), b in zip(loads, best)]
            print(f"| {what} | {min(ratios):.3f} | {sum(ratios) / len(ratios):.3f} |")
            BENCH.append(f"figures_tune_{what.replace(' ', '_')},{sum(ratios) / len(ratios):.4f},times kvcache,least,{min(ratios):.3f}")

    def split(self):
        splits = ((4, 12), (6, 10), (8, 8), (10, 6), (12, 4), (13, 3))
        trace = self.file("synthetic")
        print("| prefill + decode nodes | " + " | ".join(f"{p} + {d}" for p, d in splits) + " |\n|---|" + "---|" * len(splits))
        curves = []
        for what, options in (("kvcache, early", ["--policy", "kvcache", "--admission", "early"]), ("baton", BATON)):
            got = [sim(trace, "--set", f"prefill_nodes={p}", "--set", f"decode_nodes={d}", "--ttft", 10000, "--rate", 3, *options)["good"]
                   for p, d in splits]
            print(f"| {what} | " + " | ".join(f"{g:.0f}" for g in got) + " |")
            curves.append((what, [(p, g) for (p, _), g in zip(splits, got)]))
            BENCH.append(f"figures_split_{what.split(',')[0]},{max(got):.0f},requests,8 + 8,{max(got) / got[2]:.3f}")
        self.plot("split-synthetic.svg", [svg.Panel("synthetic x 3: requests within 10 s and 100 ms", "prefill nodes of 16", "requests", curves)])
        self.scarce()

    def scarce(self):
        """From splits with few prefill nodes to such with few decode nodes, second half."""
        splits = ((4, 12), (6, 10), (8, 8), (10, 6), (12, 4), (13, 3), (14, 2), (15, 1))
        print("\n| conversation x 6 | " + " | ".join(f"{p} + {d}" for p, d in splits) + " |\n|---|" + "---|" * len(splits))
        got = [self.compare(self.file("conversation"), 6, 30000, 100,
                            ("--from", 0.5, "--set", f"prefill_nodes={p}", "--set", f"decode_nodes={d}")) for p, d in splits]
        curves = []
        for i, what in enumerate(("kvcache", "baton")):
            print(f"| {what} | " + " | ".join(f"{g[i]['good']:.0f}" for g in got) + " |")
            curves.append((what, [(p, g[i]["good"]) for (p, _), g in zip(splits, got)]))
        for (p, d), (kv, ours) in zip(splits, got):
            BENCH.append(f"figures_scarce_{p}_{d},{ours['good']:.0f},requests,kvcache {kv['good']:.0f},{ours['good'] / max(1, kv['good']):.3f}")
        self.plot("split-conversation.svg", [svg.Panel("conversation x 6: requests within 30 s and 100 ms", "prefill nodes of 16", "requests", curves)])

    def ends(self):
        splits = ((4, 12), (6, 10), (8, 8), (10, 6), (12, 4), (13, 3), (14, 2), (15, 1))
        print("| trace, objectives | load | " + " | ".join(f"{p} + {d}" for p, d in splits) + " |\n|---|---|" + "---|" * len(splits))
        for trace in self.files:
            one = self.load_one(trace)
            for ttft, tbt in OBJECTIVES:
                for load in (1, 2, 3):
                    ratios = []
                    for p, d in splits:
                        kv, ours = self.compare(trace, load * one, ttft, tbt, ("--from", 0.5, "--set", f"prefill_nodes={p}", "--set", f"decode_nodes={d}"))
                        ratios.append(ours["good"] / max(1, kv["good"]))
                    print(f"| {name_of(trace)}, {ttft / 1000:g} s | {load} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")
                    BENCH.append(f"figures_ends_{name_of(trace)}_{ttft}_{load},{min(ratios):.3f},times kvcache,8 + 8,{ratios[2]:.3f}")

    def late(self):
        """Every prompt that takes a node up to so long, given all that was computed before it, is computed; infinite caches, no base of
        a prompt's steps, the rows' base shared by the TBT objective as in conductor/sim/capacity.c."""
        text = subprocess.run([SIM, "clusters"], stdout=subprocess.PIPE).stdout.decode()
        preset = re.search(rf"# {CLUSTER}\n((?:\w+: .*\n)*)", text)[1]
        c = {k: float(v) for k, v in re.findall(r"^(\w+): (\S+)", preset, re.M)}
        (ttft, tbt), nodes = OBJECTIVES[1], c["prefill_nodes"] + c["decode_nodes"]

        def prompt(n):
            return 1e-6 * n * (c["prefill_token_ns"] + c["prefill_attn_ns"] * n / 2)

        def rows(n, steps):
            own = [c["decode_token_ns"] + c["decode_kv_ns"] * (n + k) for k in (1, (steps + 1) / 2)]
            return 1e-6 * steps * (own[1] + c["decode_base_ns"] * own[0] / (1e6 * tbt - c["decode_base_ns"]))

        def compute(requests, first_ms, later_ms):
            """Good ones, late ones, and s of nodes: prompts, good ones' rows, late ones' rows."""
            seen, got = set(), [0, 0, 0, 0, 0]
            for r in requests:
                n, ids = r["input_length"], r["hash_ids"]
                k = next((k for k in range((n - 1) // 512) if ids[k] not in seen), (n - 1) // 512)
                ms = prompt(n) - prompt(k * 512)
                if ms > max(ttft, first_ms if k <= 1 else later_ms):
                    continue
                is_late = ms > ttft
                got[is_late] += 1
                got[2] += ms / 1e3
                got[3 + is_late] += rows(n, r["output_length"] - 1) / 1e3
                seen.update(ids[:n // 512])
            return got

        for name in ("conversation", "synthetic"):
            trace = self.file(name)
            with open(trace) as f:
                requests = [json.loads(line) for line in f]
            half, one = requests[len(requests) // 2:], self.load_one(trace)
            span = (half[-1]["timestamp"] - half[0]["timestamp"]) / 1e3
            time = {x: nodes * (span / one / x + ttft / 1e3) for x in (1, 2, 3)}
            kv = {x: max(sim(trace, "--from", 0.5, "--rate", x * one, "--ttft", ttft, "--tbt", tbt, "--policy", p, "--admission", a)["good"]
                         for p, a in KVCACHE) for x in time}
            print(f"\n{name}: s of all nodes at loads 1, 2, 3: " + ", ".join(f"{t:.0f}" for t in time.values()) + "; kvcache "
                  + ", ".join(f"{k:.0f}" for k in kv.values()))
            print("\n| late prompts up to | in time | late | prompts | rows of those in time; of all | over kvcache at load 2; 3 | share of the time at load 2; 3 |\n"
                  + "|---" * 7 + "|")
            for ms in (0, 1500, 2000, 2500, 3000, 3500, 4000, 5000, 10000, 1e9):
                good, late, p, r, rl = compute(half, ms, ms)
                print(f"| {f'{ms / 1e3:g} s' if ms < 1e9 else 'any'} | {good} | {late} | {p:.0f} s | {r:.0f}; {r + rl:.0f} s | {good / kv[2]:.3f}; {good / kv[3]:.3f} | "
                      f"{(p + r + rl) / time[2]:.2f}; {(p + r + rl) / time[3]:.2f} |")
            grid = [0, *range(1250, 4001, 250), 4500, 5000, 6000, 8000, 10000, 1e9]
            every = [(compute(half, a, b), a, b) for a in grid for b in grid]
            for x in (2, 3):
                (good, late, p, r, rl), a, b = max((e for e in every if e[0][2] + e[0][3] + e[0][4] <= time[x]), key=lambda e: e[0][0])
                print(f"load {x}, limits of their own for first and later turns: {good} ({good / kv[x]:.3f} of kvcache), {a / 1e3:g} and {b / 1e3:g} s, "
                      f"{(p + r + rl) / time[x]:.2f} of the time")
                BENCH.append(f"figures_late_{name}_{x},{good},requests,kvcache {kv[x]:.0f},{good / max(1, kv[x]):.3f}")

    def day_and_night(self, out):
        """A day of azure_code ten times as fast and a night of azure_conv at three times, answers eight times as long; twice."""
        parts = []
        for name, rate, longer in (("azure_code", 10, 1), ("azure_conv", 3, 8)):
            with open(self.file(name)) as f:
                rows = [line.split(",") for line in f.read().splitlines()[1:]]
            at = [datetime.datetime.fromisoformat(r[0][:26]).timestamp() for r in rows]
            rows = [((t - at[0]) / rate, int(r[1]), int(r[2]) * longer) for t, r in zip(at, rows)]
            parts.append((rows[:len(rows) // 2], rows[len(rows) // 2:]))
        start, dawns = 0, []
        with open(out, "w") as f:
            f.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
            for rows in (parts[0][0], parts[1][0], parts[0][1], parts[1][1]):
                dawns.append(start)
                for t, n, m in rows:
                    at = datetime.datetime(2023, 11, 16) + datetime.timedelta(seconds=start + t - rows[0][0])
                    f.write(f"{at.isoformat(sep=' ', timespec='microseconds')}0,{n},{m}\n")
                start += rows[-1][0] - rows[0][0]
        return dawns

    def roles(self):
        policies = (("kvcache", ["--policy", "kvcache", "--admission", "early"]), ("baton", BATON))
        splits, panels = ((4, 12), (6, 10), (8, 8), (10, 6), (12, 4), (14, 2), (15, 1)), []
        print("| conversation x 4, 10 s and 50 ms | | " + " | ".join(f"{p} + {d}" for p, d in splits) + " |\n|---|---|" + "---|" * len(splits))
        common = ["--rate", 4, "--ttft", 10000, "--tbt", 50]
        for what, options in policies:
            curves = []
            for roles in ("fixed", "auto"):
                got = [sim(self.file("conversation"), "--set", f"prefill_nodes={p}", "--set", f"decode_nodes={d}", *common, *options,
                           "--roles", roles) for p, d in splits]
                print(f"| {what} | {roles} | " + " | ".join(f"{g['good']:.0f}" + (f" ({g['roles']:.0f})" if g["roles"] else "") for g in got) + " |")
                curves.append((roles, [(p, g["good"]) for (p, _), g in zip(splits, got)]))
            least = [min(y for _, y in c) for _, c in curves]
            BENCH.append(f"figures_roles_{what},{least[1]:.0f},requests from the worst split,fixed {least[0]:.0f},{least[1] / least[0]:.3f}")
            panels.append(svg.Panel(f"{what}: within 10 s and 50 ms", "prefill nodes of 16 at first", "requests", curves))
        with tempfile.TemporaryDirectory() as tmp:
            trace = os.path.join(tmp, "day_night.csv")
            dawns = self.day_and_night(trace)
            common = ["--ttft", 10000, "--tbt", 100, "--roles-window", 20]
            print("\n| day and night, 8 nodes | " + " | ".join(f"{p} + {8 - p}" for p in range(2, 8)) + " | 4 + 4, roles by load |\n|---|" + "---|" * 7)
            for what, options in policies:
                got = [sim(trace, "--set", f"prefill_nodes={p}", "--set", f"decode_nodes={8 - p}", *common, *options)["good"] for p in range(2, 8)]
                r = sim(trace, "--set", "prefill_nodes=4", "--set", "decode_nodes=4", *common, *options, "--roles", "auto", "--plot", tmp)
                print(f"| {what} | " + " | ".join(f"{g:.0f}" for g in got) + f" | {r['good']:.0f} ({r['roles']:.0f} changes) |")
                BENCH.append(f"figures_roles_day_{what},{r['good']:.0f},requests,best fixed split {max(got):.0f},{r['good'] / max(got):.3f}")
                with open(os.path.join(tmp, "series.csv")) as f:
                    rows = [line.split(",") for line in f.readlines()[1:]]
                panels.append(svg.Panel(f"{what}: prefill nodes of 8 by day and night", "s", "nodes", top=8,
                                        curves=[("", [(float(x[0]) / 1e3, int(x[5])) for x in rows])],
                                        marks=[("day" if i % 2 == 0 else "night", at) for i, at in enumerate(dawns)]))
        self.plot("roles.svg", panels)

    def tools(self, out, n_tools):
        """azure_code's prompts, each behind one of n_tools prompts of 4k to 32k tokens (Zipf); others every ten minutes."""
        rand, tools, block = random.Random(1), {}, 0
        weights = [1 / (k + 1) for k in range(n_tools)]
        with open(self.file("azure_code")) as f, open(out, "w") as g:
            rows = [line.split(",") for line in f.read().splitlines()[1:]]
            begin = datetime.datetime.fromisoformat(rows[0][0][:26])
            for r in rows:
                at = (datetime.datetime.fromisoformat(r[0][:26]) - begin).total_seconds()
                tool = (at // 600, rand.choices(range(n_tools), weights)[0])
                if tool not in tools:
                    n = rand.randint(8, 64)
                    tools[tool] = list(range(block, block + n))
                    block += n
                own = -(-int(r[1]) // 512)
                ids = tools[tool] + list(range(block, block + own))
                block += own
                g.write(json.dumps({"timestamp": int(at * 1000), "input_length": len(tools[tool]) * 512 + int(r[1]),
                                    "output_length": int(r[2]), "hash_ids": ids}) + "\n")

    def copies(self):
        budgets = (0, 1e8, 1e9, 1e10)
        print("| tools | rate | policy | bytes a second | copies | TTFT p90, p99 | within 2 s and 100 ms |\n|---|---|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as tmp:
            trace = os.path.join(tmp, "tools.jsonl")
            for n_tools in (64, 8):
                self.tools(trace, n_tools)
                for rate in (10, 20, 30):
                    for policy, admission in (("cache-aware", "early"), ("kvcache", "early"), ("baton", "priced")):
                        got = [sim(trace, "--policy", policy, "--admission", admission, "--rate", rate, "--ttft", 2000, "--replica-bytes", b)
                               for b in budgets]
                        for b, r in zip(budgets, got):
                            print(f"| {n_tools} | {rate} | {policy} | {b:.0e} | {r['copies']:.0f}, {r['copied_gb']:.0f} GB | {r['ttft_p90_s']:.2f}, "
                                  f"{r['ttft_p99_s']:.2f} s | {r['good']:.0f} |")
                        BENCH.append(f"figures_copies_{n_tools}_{rate}_{policy},{got[2]['good']:.0f},requests,without {got[0]['good']:.0f},"
                                     f"{got[2]['good'] / got[0]['good']:.3f}")

    def tiers(self):
        slab, times, panels = 300000, (0, 1, 3, 10), []
        print("| trace | written | SSD / slab | slab | SSD | fetched | all | mean TTFT | written |\n|---|---|---|---|---|---|---|---|---|")
        for name in ("conversation", "synthetic"):
            curves = []
            for write in ("second_use", "evict", "always"):
                curve = []
                for n in times:
                    r = sim(self.file(name), "--set", f"cache_tokens={slab}", "--set", f"ssd_tokens={n * slab}", "--ssd-write", write)
                    curve.append((n, r["hit"]))
                    if n or write == "second_use":
                        print(f"| {name} | {write if n else ''} | {n} | {r['hit'] - r['ssd'] - r['fetched']:.3f} | {r['ssd']:.3f} | {r['fetched']:.3f} | "
                              f"{r['hit']:.3f} | {r['ttft_mean_s']:.2f} s | {r['written_gb'] / 1e3:.1f} TB |")
                curves.append((write, curve))
                BENCH.append(f"figures_tiers_{name}_{write},{curve[-1][1]:.3f},share of prompt tokens,without SSD {curve[0][1]:.3f},"
                             f"{curve[-1][1] / curve[0][1]:.3f}")
            panels.append(svg.Panel(f"{name}: prompt tokens found", "SSD over slab", "share", curves))
        self.plot("hits-tiers.svg", panels)


def main():
    names = ("ttft", "hits", "admission", "goodput", "ablation", "tune", "split", "ends", "late", "roles", "copies", "tiers")
    args = sys.argv[1:] or ["goodput", os.path.join(ROOT, "tests", "sim")]
    if len(args) not in (2, 3) or args[0] not in (*names, "all"):
        sys.exit(__doc__)
    f = Figures(args[1], args[2] if len(args) == 3 else None)
    for name in names if args[0] == "all" else (args[0],):
        print(f"## {name}")
        getattr(f, name)()
    print("\n".join("bench," + line for line in BENCH))


main()

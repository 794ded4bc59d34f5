#!/usr/bin/python3
"""Chaos: a cluster of three nodes under load, and faults one after another, for as long as is wanted (docs/FAULTS.md).

Starts 3 kvstores with SSD tiers, 2 prefill and 3 decode workers and 2 conductors, with certificates and three tenants, takes
the answers of some dozens of requests, and then, in rounds: load from several clients, one or two faults, load
stops, nothing may be held any more. Ends with counts and one line "N passed, M failed"; exit 1 if anything was violated.
The seed orders faults and requests; times are the machine's.

    tests/chaos/chaos.py [--minutes M] [--seed S] [--only FAULT,...] [--clients N] [--device null] [--no-network] [--keep] [--calm]
    (BUILD: the build directory; as root it makes a network of its own, see net.py)
"""
import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

HERE = os.path.dirname(os.path.abspath(__file__))
sys.dont_write_bytecode = True
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "cluster"))
import net  # noqa: E402
import sanitizer  # noqa: E402
from cluster import BUILD, Cluster, Watch, wait_for  # noqa: E402
from faults import FAULTS  # noqa: E402
from invariants import Invariants  # noqa: E402
from load import Load  # noqa: E402

IN_NETWORK = "BATON_CHAOS_IN_NETWORK"  # set in the process that has its own namespaces
FAULTS_MOST_S = 120  # a fault that takes longer hangs


class Context:
    """What a fault's function gets: the cluster, the load, random numbers of its own."""

    def __init__(self, run, seed):
        self.cluster, self.net, self.load, self.seed = run.cluster, run.cluster.net, run.load, seed
        self.rng, self.notes = random.Random(seed), []

    def note(self, text):
        self.notes.append(text)


class Run:
    def __init__(self, options):
        self.o, self.start = options, time.monotonic()
        self.violations, self.lock = [], threading.Lock()
        self.by_fault, self.failed_by_fault = Counter(), Counter()
        self.calm_rounds = 0
        self.now = "start"
        self.cluster = self.load = self.watch = None

    def say(self, text):
        print(f"{time.monotonic() - self.start:7.1f} {text}", flush=True)

    def violation(self, text):
        with self.lock:
            self.violations.append(f"[{self.now}] {text}")
            if len(self.violations) <= 50:
                self.say(f"VIOLATION [{self.now}] {text}"[:4000])

    def minutes_left(self):
        return self.o.minutes - (time.monotonic() - self.faults_from) / 60

    # ---- faults ----
    def possible(self):
        out = []
        for f in FAULTS:
            if self.o.only and f.name not in self.o.only:
                continue
            if f.needs == "net" and not self.cluster.net:
                continue
            if f.needs == "disk" and not self.cluster.mounted:
                continue
            out.append(f)
        return out

    def deck(self, rng):
        """Every fault once, in some order; then anew."""
        while self.o.calm:
            yield []
        while True:
            cards = self.possible()
            rng.shuffle(cards)
            while cards:
                first = cards.pop()
                pair = [first]
                if rng.random() < 0.3:
                    other = next((f for f in reversed(cards) if not f.uses & first.uses), None)
                    if other:
                        cards.remove(other)
                        pair.append(other)
                yield pair

    def inject(self, f, seed):
        x = Context(self, seed)
        try:
            f.function(x)
        except Exception as e:
            self.violation(f"{f.name} ({', '.join(x.notes)}): {type(e).__name__}: {e}")
        return x

    def round(self, number, pair, rng):
        self.now = f"round {number}: " + " + ".join(f.name for f in pair)
        before = len(self.violations)
        seeds = [f"{self.o.seed} {number} {f.name}" for f in pair]
        time.sleep(rng.uniform(0.3, 1.5))
        notes = [[] for _ in pair]

        def one(i):
            notes[i] = self.inject(pair[i], seeds[i]).notes

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(pair))]
        for t in threads:
            t.start()
        if not pair:
            time.sleep(8)
        for t, f in zip(threads, pair):
            t.join(FAULTS_MOST_S)
            if t.is_alive():
                self.violation(f"{f.name} has not ended after {FAULTS_MOST_S} s")
        try:
            wait_for(lambda: self.cluster.all_up() == "", 40, "all daemons have met again")
        except AssertionError:
            self.violation(f"not all sessions are back after 40 s: {self.cluster.all_up()}")
            self.revive()
        time.sleep(rng.uniform(0.2, 1))
        self.load.pause()
        self.inv.quiet()
        self.load.go_on()
        found = len(self.violations) - before
        self.calm_rounds += not pair
        for f in pair:
            self.by_fault[f.name] += 1
            self.failed_by_fault[f.name] += found > 0
        self.say(f"round {number:4} " + " + ".join(f"{f.name} ({', '.join(n)})" for f, n in zip(pair, notes)) +
                 f": {'ok' if not found else f'{found} VIOLATIONS'}; {dict(self.load.counts)}")

    def revive(self):
        """So that one failure does not make all later rounds fail as well."""
        if self.cluster.net:
            self.cluster.net.heal()
        for d in self.cluster.daemons:
            if not d.alive():
                try:
                    d.start_again()
                except AssertionError as e:
                    self.violation(str(e))

    # ---- the whole ----
    def main(self):
        why = self.o.no_network and "not wanted" or net.missing()
        self.say(f"chaos: {self.o.minutes:g} minutes, seed {self.o.seed}; a network of its own: {why or 'yes'}")
        bad = []
        try:
            self.cluster = Cluster(self.o.seed, not why, self.o.device)
            self.say(f"the cluster runs in {self.cluster.folder}")
            self.watch = Watch(self.cluster, self.violation)
            self.watch.start()
            self.load = Load(self.cluster, self.o.seed, self.o.clients, self.violation, self.watch.slack)
            self.load.learn()
            self.inv = Invariants(self.cluster, self.violation)
            self.say(f"{len(self.load.cases)} kinds of requests have their answers")
            self.load.start()
            time.sleep(3)  # everything has been used once before sizes are taken
            self.load.pause()
            self.inv.quiet()
            self.load.go_on()
            rng = random.Random(self.o.seed)
            cards = self.deck(random.Random(f"{self.o.seed} deck"))
            number, self.faults_from = 0, time.monotonic()
            while self.minutes_left() > 0 and len(self.violations) < self.o.most_violations:
                number += 1
                self.round(number, next(cards), rng)
            self.now = "end"
            self.load.stop()
            self.inv.quiet()
        except (KeyboardInterrupt, SystemExit):
            self.violation("interrupted")
        except Exception as e:
            self.violation(f"{type(e).__name__}: {e}")
        finally:
            if self.cluster:
                if self.watch:
                    self.watch.stopping = True
                bad = self.cluster.stop()
                bad += self.cluster.reports()
                self.say(f"wire processes that were lost, by a fault or by UCX itself: {self.cluster.wire_deaths}")
        reports = sanitizer.take_reports(1 << 20)
        if reports:
            with open(os.path.join(BUILD, "tests", "chaos-reports"), "w") as f:
                f.write(reports)
            bad.append(f"sanitizers have reported, all of it in {f.name}: {reports[:3000]}")
        for b in bad:
            self.violation(b)
        return self.report()

    def report(self):
        if self.cluster and (self.violations or self.o.keep):
            kept = os.path.join(BUILD, "chaos", f"seed-{self.o.seed}")
            shutil.rmtree(kept, ignore_errors=True)
            self.cluster.keep_logs(kept)
            with open(os.path.join(kept, "violations"), "w") as f:
                f.write("\n".join(self.violations) + "\n")
            self.say(f"logs: {kept}")
        if self.cluster:
            self.cluster.remove()
        cases = Counter()
        for f in FAULTS:
            if self.by_fault[f.name]:
                print(f"fault {f.name:34} {self.by_fault[f.name]:4} times, {self.failed_by_fault[f.name]} with violations"
                      f" (cases {', '.join(map(str, f.cases))})")
                for c in f.cases:
                    cases[c] += self.by_fault[f.name]
        left_out = [f.name for f in FAULTS if not self.by_fault[f.name]]
        if left_out:
            print("not injected: " + ", ".join(left_out))
        print("cases: " + ", ".join(f"{c}: {n}" for c, n in sorted(cases.items())))
        if self.load:
            print("requests: " + ", ".join(f"{k} {v}" for k, v in sorted(self.load.counts.items())) +
                  f"; refusals by status {dict(self.load.refused)}")
        if getattr(self, "inv", None):
            print("most above the first quiet moment: " + ", ".join(f"{k} {w} {v}" for (k, w), v in sorted(self.inv.most.items())))
            for name, (n, kinds) in sorted(self.inv.most_descriptors.items()):
                print(f"descriptors of {name}: {n} more than at first: {kinds}")
        if self.watch and self.watch.busiest:
            print(f"this machine had other work: limits of time were up to {10 * self.watch.busiest:.0f} s longer")
        rounds = sum(self.by_fault.values()) or self.calm_rounds
        wrong = len(self.violations)
        print(f"seed {self.o.seed}" + ("" if not wrong else f": {wrong} violations, the first: {self.violations[0][:300]}"))
        print(f"{rounds - sum(self.failed_by_fault.values()) if rounds else 0} passed, "
              f"{sum(self.failed_by_fault.values()) or (1 if wrong else 0)} failed")
        return 1 if wrong or not rounds else 0


def in_own_network():
    """Runs this program again in namespaces of its own, as far as they can be had; its exit status."""
    cmd = ["unshare", "-n", "-m", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
    p = subprocess.Popen(cmd, env=dict(os.environ, **{IN_NETWORK: "1"}))
    for s in signal.SIGINT, signal.SIGTERM:
        signal.signal(s, lambda n, _: p.send_signal(n))
    return p.wait()


def main():
    a = argparse.ArgumentParser(description="Faults one after another under load; see docs/FAULTS.md.")
    a.add_argument("--minutes", type=float, default=60)
    a.add_argument("--seed", type=int, default=None)
    a.add_argument("--only", default="", help="names of faults, by commas")
    a.add_argument("--calm", action="store_true", help="no faults: load only")
    a.add_argument("--clients", type=int, default=6)
    a.add_argument("--device", choices=["cpu", "null"], default="cpu")
    a.add_argument("--no-network", action="store_true", help="all on loopback, as it is without root")
    a.add_argument("--most-violations", type=int, default=40, help="ends after so many")
    a.add_argument("--keep", action="store_true", help="logs also of a run without violations")
    o = a.parse_args()
    if o.seed is None:
        o.seed = int.from_bytes(os.urandom(3), "little")
        sys.argv += ["--seed", str(o.seed)]
    o.only = [w for w in o.only.split(",") if w]
    unknown = set(o.only) - {f.name for f in FAULTS}
    if unknown:
        a.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in FAULTS)}")
    if not os.environ.get(IN_NETWORK) and not o.no_network and not net.missing():
        return in_own_network()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sanitizer.start()
    return Run(o).main()


if __name__ == "__main__":
    sys.exit(main())

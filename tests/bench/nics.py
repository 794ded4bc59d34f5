#!/usr/bin/python3
"""One flow over one network card and over two, cards of MBIT Mbit/s each (veth and tbf between two network
namespaces), and over two of which one fails a quarter of the way: by its link, and with both links up. Wants
root. The median of the rounds; ratios against one card in the same rounds. CPU time stands beside the rates, for
the machine's load shows in neither. Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO.

    tests/bench/nics.py [ROUNDS [MBIT]]
"""
import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
import netns  # noqa: E402
from wire_peers import Peer  # noqa: E402

SPAN, LAYERS, PAGE = 64 << 20, 4, 16


class Rig:
    def __init__(self, machines, kib, cards):
        self.machines, self.blocks = machines, SPAN // ((kib << 10) * LAYERS)
        opts = dict(seg=kib << 10, layers=LAYERS, slots=self.blocks + 4)
        self.a, self.b = (Peer(n, machine=m, listen=",".join(m.address(c) for c in cards), **opts)
                          for n, m in zip("ab", machines))
        self.tokens, self.chunk = self.blocks * PAGE, PAGE * max(1, 1024 // kib)
        self.items = -(-self.tokens // self.chunk) * LAYERS
        self.n = 0
        self.flow(lambda: None)

    def flow(self, trouble):
        """MB/s, CPU s/GB of both sides. trouble: called when a quarter is there."""
        self.n += 1
        n, a, b = self.n, self.a, self.b
        a.grant(n, 1, self.tokens, self.chunk, n)
        before = a.usage()["cpu_s"] + b.usage()["cpu_s"]
        b.recv(a, n, 1, self.tokens, self.chunk)
        a.wait(f"lookup {n}")
        a.say(f"trailer {n} 1 0")
        start = int(a.ask(f"raise {n} {self.items}", rf"raised {n} \d+ at=(\d+)")[1])
        quarter = "|".join(str(i) for i in range(self.items // 4, self.items))
        b.wait(rf"progress {n} ({quarter}) ")
        trouble()
        end = int(b.wait(rf"progress {n} {self.items} at=(\d+)", 120)[1])
        b.wait(f"quiet {n}$")
        cpu = a.usage()["cpu_s"] + b.usage()["cpu_s"] - before
        b.ask(f"verify {n} {n}", f"verify {n} bad=0 crc_bad=0")
        b.say(f"forget {n}")
        a.wait(f"send_end {n} OK")
        a.say(f"drop {n}")
        return SPAN * 1e3 / (end - start), cpu * 1e9 / SPAN

    def healed(self):
        for p in (self.a, self.b):
            while p.metrics()['baton_kv_card_lanes{interface="card2"}'] < 1:
                time.sleep(0.05)

    def stop(self):
        self.a.stop()
        self.b.stop()


def median(rows, at=0):
    return statistics.median(x[at] for x in rows)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    mbit = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    if netns.missing():
        raise SystemExit(netns.missing())
    pair, lines = netns.Pair(2), []
    one, other = pair.machines
    try:
        for m in pair.machines:
            for card in (1, 2):
                m.rate(card, mbit)
        for kib in (1024, 64):
            single, double = Rig(pair.machines, kib, [1]), Rig(pair.machines, kib, [1, 2])
            rows = {"one": [], "two": [], "link": [], "path": []}
            for _ in range(rounds):
                rows["one"].append(single.flow(lambda: None))
                rows["two"].append(double.flow(lambda: None))
                rows["link"].append(double.flow(lambda: other.link(2, "down")))
                other.link(2, "up")
                double.healed()
                rows["path"].append(double.flow(lambda: one.cut(2, other)))
                one.join(2, other)
                double.healed()
            single.stop()
            double.stop()
            print(f"{kib} KiB, cards of {mbit} Mbit/s, {rounds} rounds, medians: "
                  + ", ".join(f"{k} {median(r):.1f} MB/s, {median(r, 1):.2f} CPU s/GB" for k, r in rows.items()),
                  flush=True)
            for name, k in (("cards", "two"), ("cards_link_lost", "link"), ("cards_path_lost", "path")):
                lines.append(f"bench,wire_{kib}k_{name},{median(rows[k]):.1f},MB/s,one card "
                             f"{median(rows['one']):.1f},{median(rows[k]) / median(rows['one']):.2f}")
            lines.append(f"bench,wire_{kib}k_cards_cpu,{median(rows['two'], 1):.2f},CPU s/GB of both sides,one card "
                         f"{median(rows['one'], 1):.2f},{median(rows['two'], 1) / median(rows['one'], 1):.2f}")
    finally:
        pair.end()
    print("\n".join(lines))


if __name__ == "__main__":
    main()

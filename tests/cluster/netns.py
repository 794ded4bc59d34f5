"""Two machines for tests of the wire, each a network namespace of its own, joined by a network for gRPC and
one for each pair of network cards (veth). They end with the process that made them; nothing gets a name in
the system. Needs root, iproute2 and util-linux."""
import functools
import os
import shutil
import subprocess
import time

import pytest

BASE = "10.231"  # seen by nobody outside


class Machine:
    def __init__(self, index):
        self.index = index
        self.rpc_host = self.address(0)
        # /sys shows the network cards of the namespace it was mounted in, and UCX looks there
        self.holder = subprocess.Popen(
            ["unshare", "-n", "-m", "sh", "-c",
             "mount -t sysfs sysfs /sys && ip link set lo up && echo ready && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline().strip() != "ready":
            why = self.holder.stderr.read().strip()
            self.end()
            raise OSError(why or "no network namespace")
        self.within = ["nsenter", "-t", str(self.holder.pid), "-n", "-m", "--wd=" + os.getcwd()]

    def address(self, card):
        """card 0: the network of gRPC."""
        return f"{BASE}.{card}.{self.index + 1}"

    def run(self, *args):
        subprocess.run(self.within + list(args), check=True, stdout=subprocess.DEVNULL)

    def output(self, *args):
        return subprocess.run(self.within + list(args), check=True, stdout=subprocess.PIPE, text=True).stdout

    def link(self, card, state):
        self.run("ip", "link", "set", f"card{card}", state)

    def wait_link(self, card, state="up"):
        """The kernel says so a while after `ip link set`."""
        end = time.monotonic() + 60
        while self.output("cat", f"/sys/class/net/card{card}/operstate").strip() != state:
            assert time.monotonic() < end, f"card{card} is not {state}"
            time.sleep(0.02)

    def rate(self, card, mbit):
        """What the card sends at most."""
        self.run("tc", "qdisc", "replace", "dev", f"card{card}", "root", "tbf", "rate", f"{mbit}mbit",
                 "burst", "256kb", "latency", "100ms")

    def cut(self, card, other):
        """What it sends to the other arrives nowhere; the link stays up."""
        self.run("ip", "neigh", "replace", other.address(card), "lladdr", "02:00:00:00:00:99", "dev", f"card{card}",
                 "nud", "permanent")

    def join(self, card, other):
        self.run("ip", "neigh", "flush", "to", other.address(card), "dev", f"card{card}", "nud", "permanent")

    def end(self):
        self.holder.stdin.close()
        self.holder.wait(60)
        self.holder.stdout.close()
        self.holder.stderr.close()


class Pair:
    """Machines [0] and [1]; cards 1 to n of one face those of the other."""

    def __init__(self, n_cards):
        self.machines = []
        try:
            self.machines += [Machine(0)]
            self.machines += [Machine(1)]
            for card in range(n_cards + 1):
                a, b = self.machines
                a.run("ip", "link", "add", f"card{card}", "type", "veth", "peer", "name", f"card{card}",
                      "netns", str(b.holder.pid))
                for m in self.machines:
                    m.run("ip", "addr", "add", m.address(card) + "/24", "dev", f"card{card}")
                    m.link(card, "up")
                for m in self.machines:
                    m.wait_link(card)
        except BaseException:
            self.end()
            raise

    def end(self):
        for m in self.machines:
            m.end()


@functools.lru_cache(None)
def missing():
    """Why there can be no namespaces here; empty if there can."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool} here (packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces want root"
    try:
        pair = Pair(1)
        try:
            pair.machines[0].rate(1, 100)
        finally:
            pair.end()
    except (OSError, subprocess.CalledProcessError) as e:
        return f"network namespaces cannot be made here: {e}"
    return ""


def need():
    if missing():
        pytest.skip(missing())

"""A network of its own for a chaos run: every node is a network namespace, and all frames between them go through one
process (tests/tools/net_switch.c) that loses, delays, repeats or resets them by rules. Without root, or without
namespaces and TAP devices, there is no such network: missing() says why, and the cases that need it are left out."""
import os
import shutil
import subprocess
import threading

PREFIX = "10.231.0"  # nobody outside sees these addresses
MTU = 9000
MAIN = "m"  # this process: clients and etcd


class Machine:
    """A namespace that ends with the process that made it."""

    def __init__(self, name, address):
        self.name, self.address = name, address
        # UCX looks into /sys, which shows the network cards of the namespace in which it was mounted.
        self.holder = subprocess.Popen(
            ["unshare", "-n", "-m", "sh", "-c", "mount -t sysfs sysfs /sys && ip link set lo up && echo ready && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline().strip() != "ready":
            raise OSError(self.holder.stderr.read().strip() or "no network namespace")
        self.within = ["nsenter", "-t", str(self.holder.pid), "-n", "-m", "--wd=/"]

    def end(self):
        self.holder.stdin.close()
        self.holder.wait(10)


class Net:
    """Machines by name, and the rules between them."""

    def __init__(self, names, seed, switch):
        self.machines, self.lock = {}, threading.Lock()
        self.p = None
        try:
            for i, name in enumerate(names):
                self.machines[name] = Machine(name, f"{PREFIX}.{i + 1}")
            self.address = {n: m.address for n, m in self.machines.items()} | {MAIN: f"{PREFIX}.100"}
            pids = [f"{n}={m.holder.pid}" for n, m in self.machines.items()] + [f"{MAIN}=0"]
            self.p = subprocess.Popen([switch, str(seed), "net0", *pids], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True, bufsize=1)
            if self.p.stdout.readline().strip() != "ready":
                raise OSError("net_switch did not start")
            for name, address in self.address.items():
                within = self.machines[name].within if name in self.machines else []
                for args in (["addr", "add", address + "/24", "dev", "net0"], ["link", "set", "net0", "mtu", str(MTU)],
                             ["link", "set", "net0", "up"]):
                    subprocess.run([*within, "ip", *args], check=True)
        except BaseException:
            self.end()
            raise

    def say(self, line):
        with self.lock:
            self.p.stdin.write(line + "\n")
            answer = self.p.stdout.readline().strip()
            more = self.p.stdout.readline().strip() if answer.startswith("stats") else "ok"
        if answer.startswith("bad") or more != "ok":
            raise RuntimeError(f"net_switch: {line!r}: {answer}")
        return answer

    def rule(self, src, dst, **values):
        self.say(f"set {src} {dst} " + " ".join(f"{k}={v}" for k, v in values.items()))

    def both(self, a, b, **values):
        self.rule(a, b, **values)
        self.rule(b, a, **values)

    def cut(self, a, b):
        self.both(a, b, loss=1)

    def heal(self):
        self.say("clear")

    def end(self):
        if self.p:
            self.p.stdin.close()
            self.p.wait(10)
        for m in self.machines.values():
            m.end()


def missing():
    """Why there can be no such network here; empty if there can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"no {tool} here (packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces and TAP devices want root"
    p = subprocess.run(["unshare", "-n", "-m", "sh", "-c", "mount -t sysfs sysfs /sys && ip tuntap add dev t0 mode tap"],
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if p.returncode == 0 else "no network namespace with a TAP device: " + p.stdout.strip()

"""baton-bench kv: two real kvstores on this machine, scripted workers, a
conductor of grpcio. What KV goes through:

  put      a worker's block into its node's pool: from asking for a slot until
           it has it, one at a time
  lease    a worker leases blocks by their keys and gives them back: blocks a
           second, in batches, four under way
  get      a prefix that the node has: from the conductor's Reserve until the
           worker has the slots
  fetch    a prefix that another node has, read into this node's slots, CRC
           checked
  stream   a prompt being computed: the writer raises its flow, the other
           node's reader has all of it
  mixed    put, get, fetch and stream at once, each with workers and a
           conductor of its own, beside each alone
  restart  kill -9 of a kvstore with blocks in its slab: until it is ready
           again, until a worker has a prefix, what is left

All of them in this order, or those that are named. Needs the source tree
(tests/cluster, make tests). fetch and stream are compared with a plain socket
in the same run. On a terminal a bar says how far it is.
"""
import argparse
import os
import sys
import threading
import time

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MODES = ("put", "lease", "get", "fetch", "stream", "mixed", "restart")
PUTS, LEASES, BATCHES, PREFIXES = 200, 100000, (1, 16, 64), 8
PUT_EVERY_S = 0.002  # in mixed: a slot is free again once it is sealed, and who does not wait for that gets none


def load_harness():
    cluster = os.path.join(ROOT, "tests", "cluster")
    if not os.path.exists(os.path.join(cluster, "kvstore_nodes.py")):
        sys.exit("baton-bench: kv runs from the source tree (tests/bench/baton-bench kv)")
    for tool in ("bin/baton-kvstore", "tests/tools/kv_worker"):
        if not os.path.exists(os.path.join(ROOT, os.environ.get("BUILD", "build"), tool)):
            sys.exit(f"baton-bench: kv needs {tool}; run make tests")
    sys.path[:0] = [cluster, HERE]
    etcd = os.path.join(ROOT, "build", "third", "etcd", "usr", "bin")
    os.environ["PATH"] = os.environ["PATH"] + os.pathsep + etcd
    import kv_rig
    import kvstore_nodes
    kvstore_nodes.MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
    kvstore_nodes.BLOCK, kvstore_nodes.CHUNK = kv_rig.BLOCK, kv_rig.CHUNK
    return kvstore_nodes, kv_rig


class Bar:
    """How far the modes are, on a terminal."""

    def __init__(self, modes):
        self.modes, self.at, self.shown = modes, 0, sys.stderr.isatty()

    def tell(self, part, of):
        if self.shown:
            done = (self.at + part / of) / len(self.modes)
            name = self.modes[self.at]
            sys.stderr.write(f"\r[{'#' * int(30 * done):30}] {100 * done:3.0f} %  {name:8}")
            sys.stderr.flush()

    def end(self):
        if self.shown:
            sys.stderr.write("\r" + 60 * " " + "\r")


class Run:
    """One method a mode; each adds to lines."""

    def __init__(self, nodes, kv, rounds, seconds, bar):
        import wire
        self.kv, self.rounds, self.seconds, self.bar, self.lines = kv, rounds, seconds, bar, []
        self.alone = {}
        self.raw = wire.plain_socket(256 << 10)[0]
        self.rig = kv.Rig(nodes)
        self.c = self.rig.client()

    def line(self, name, value, unit, than="-", ratio="-"):
        self.lines.append(f"bench,kv_{name},{value},{unit},{than},{ratio}")

    def times(self, n, do):
        out = []
        for i in range(n):
            self.bar.tell(i, n)
            out.append(do(i))
        return out

    def put(self):
        before = self.rig.a.metrics()[self.kv.SEALED]
        got = self.times(PUTS, lambda i: self.c.put())
        self.rig.a.wait_metric(self.kv.SEALED, before + PUTS)
        self.alone["put"] = self.kv.median(got)
        self.line("put", f"{self.alone['put']:.3f}", "ms")

    def lease(self):
        for i in range(max(BATCHES)):
            self.c.put(f"put {i}")
        self.rig.a.wait_quiet()
        for batch in BATCHES:
            value = max(self.times(self.rounds, lambda i, n=batch: self.c.lease(max(LEASES // n, 1), n)))
            self.line(f"lease_pairs_in_batches_of_{batch}", f"{value:.0f}", "pairs/s", "aim 20000", f"{value / 20000:.2f}")
        self.rig.a.wait_quiet()

    def get(self):
        request, keys = self.c.next()
        self.c.write(request, keys)
        got = self.times(20 * self.rounds, lambda i: self.c.get(keys))
        assert all(found == self.kv.BLOCKS for _, found in got), got
        self.rig.a.wait_quiet()
        self.alone["get"] = self.kv.median(ms for ms, _ in got)
        self.line("get", f"{self.alone['get']:.3f}", "ms")

    def moved(self, name):
        def one(i):
            got = getattr(self.c, name)()
            self.rig.b.wait_quiet()
            return got
        self.alone[name] = self.kv.rate(self.times(4 * self.rounds, one))
        self.line(name, f"{self.alone[name]:.3f}", "GB/s", f"plain socket {self.raw:.2f}", f"{self.alone[name] / self.raw:.2f}")

    def fetch(self):
        self.moved("fetch")

    def stream(self):
        self.moved("stream")

    def mixed(self):
        lines = self.lines
        self.lines = []  # what is compared with, if nobody asked for it
        for name in ("put", "get", "fetch", "stream"):
            if name not in self.alone:
                getattr(self, name)()
        self.lines = lines
        clients = {name: self.rig.client() for name in ("put", "get", "fetch", "stream")}
        request, keys = clients["get"].next()
        clients["get"].write(request, keys)
        errors, got = [], {name: [] for name in clients}
        do = {"put": lambda c: (c.put(), time.sleep(PUT_EVERY_S))[0],
              "get": lambda c: c.get(keys), "fetch": lambda c: c.fetch(), "stream": lambda c: c.stream()}
        start = time.monotonic()

        def work(name):
            try:
                while time.monotonic() - start < self.seconds and not errors:
                    got[name].append(do[name](clients[name]))
            except Exception as e:  # the others end, then it is told
                errors.append(f"{name}: {type(e).__name__}: {e}")
        threads = [threading.Thread(target=work, args=(name,)) for name in clients]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            self.bar.tell(min(time.monotonic() - start, self.seconds), self.seconds)
            time.sleep(0.2)
        if errors:
            raise SystemExit("baton-bench: kv mixed: " + "; ".join(errors))
        self.rig.a.wait_quiet()
        self.rig.b.wait_quiet()
        found = [n for _, n in got["get"]]
        got["get"] = [ms for ms, _ in got["get"]]
        for name in ("put", "get"):
            value, was = self.kv.median(got[name]), self.alone[name]
            self.line(f"mixed_{name}", f"{value:.3f}", "ms", f"alone {was:.3f}", f"{value / was:.2f}")
        for name in ("fetch", "stream"):
            value, was = self.kv.rate(got[name]), self.alone[name]
            self.line(f"mixed_{name}", f"{value:.3f}", "GB/s", f"alone {was:.3f}", f"{value / was:.2f}")
        asked = len(found) * self.kv.BLOCKS
        self.line("mixed_get_found", sum(found), "blocks", f"asked {asked}", f"{sum(found) / asked:.3f}")
        self.line("mixed_done", sum(map(len, got.values())), f"in {self.seconds:g} s",
                  " ".join(f"{name} {len(x)}" for name, x in got.items()))

    def restart(self):
        self.bar.tell(0, 4)
        prefixes = [self.c.next() for _ in range(PREFIXES)]
        for request, keys in prefixes:
            self.c.write(request, keys)
        self.rig.a.wait_quiet()
        had = sum(self.c.resident(keys) for _, keys in prefixes)
        self.bar.tell(1, 4)
        start = time.perf_counter()
        ready = self.rig.kill_a()
        self.bar.tell(2, 4)
        self.c = self.rig.client()
        self.rig.a.wait_log("ev=slab_checked")  # a block is found when its bytes have been compared
        first = self.c.get(prefixes[-1][1])[1]
        served = (time.perf_counter() - start) * 1e3
        assert first == self.kv.BLOCKS, f"{first} of {self.kv.BLOCKS} blocks of the last prefix are left"
        left = sum(self.c.resident(keys) for _, keys in prefixes)
        self.line("restart_ready", f"{ready:.0f}", "ms")
        self.line("restart_served", f"{served:.0f}", "ms")
        self.line("restart_left", left, "blocks", f"there before {had}", f"{left / had:.3f}")


def main(args):
    p = argparse.ArgumentParser(prog="baton-bench kv", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", nargs="*", metavar="MODE", help=f"one or more of {', '.join(MODES)}; default: all")
    p.add_argument("--rounds", type=int, default=2, help="repetitions, default 2")
    p.add_argument("--seconds", type=float, default=5, help="duration of mode mixed, default 5")
    opts = p.parse_args(args)
    wrong = [m for m in opts.mode if m not in MODES]
    if wrong:
        p.error(f"no mode is called {wrong[0]}; there are {', '.join(MODES)}")
    if opts.rounds < 1 or opts.seconds <= 0:
        p.error("--rounds and --seconds are positive")
    nodes, kv = load_harness()
    modes = [m for m in MODES if m in opts.mode or not opts.mode]
    bar = Bar(modes)
    run = Run(nodes, kv, opts.rounds, opts.seconds, bar)
    try:
        for bar.at, mode in enumerate(modes):
            bar.tell(0, 1)
            getattr(run, mode)()
    finally:
        bar.end()
        run.rig.end()
    mb = kv.BLOCKS * run.rig.block_bytes / 1e6
    print(f"{kv.BLOCKS} blocks of {kv.BLOCK} tokens, {run.rig.block_bytes} bytes each; a prefix is {mb:.1f} MB; "
          f"plain socket {run.raw:.2f} GB/s")
    print("\n".join(run.lines))
    return 0

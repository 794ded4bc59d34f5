"""baton-bench kv: two real kvstores on this machine, scripted workers, a conductor of grpcio. Four ways that KV takes:

  put     a worker's block into its node's pool: from asking for a slot until it has it, one at a time
  get     a prefix that the node has: from the conductor's Reserve until the worker has the slots
  fetch   a prefix that another node has, read into this node's slots, CRC checked
  stream  a prompt being computed: the writer raises its flow, the other node's reader has all of it
  lease   a worker leases blocks by their keys and gives them back: blocks a second, in batches, four under way

Needs the source tree (tests/cluster, make tests). fetch and stream are compared with a plain socket in the same run.
"""
import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BLOCK, CHUNK, BLOCKS, PUTS, LEASES = 64, 512, 64, 200, 100000
TOKENS = BLOCK * BLOCKS
SEALED = "baton_kvstore_blocks_sealed_total"


def load_harness():
    cluster = os.path.join(ROOT, "tests", "cluster")
    if not os.path.exists(os.path.join(cluster, "kvstore_nodes.py")):
        sys.exit("baton-bench: kv runs from the source tree (tests/bench/baton-bench kv)")
    sys.path[:0] = [cluster, HERE]
    etcd = os.path.join(ROOT, "build", "third", "etcd", "usr", "bin")
    os.environ["PATH"] = os.environ["PATH"] + os.pathsep + etcd
    import kvstore_nodes
    kvstore_nodes.MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
    kvstore_nodes.BLOCK, kvstore_nodes.CHUNK = BLOCK, CHUNK
    return kvstore_nodes


class Bench:
    def __init__(self, nodes, rounds):
        self.n, self.rounds, self.request = nodes, rounds, 0
        self.folder = tempfile.mkdtemp(prefix="baton-kv-bench-")
        self.parts = [nodes.Etcd(self.folder)]
        try:
            self.start()
        except BaseException:
            self.end()
            raise

    def start(self):
        def add(part):
            self.parts.append(part)
            return part
        quiet = {"log__level": "info", "slab": "128MiB"}
        self.a, self.b = (add(self.n.Kvstore(self.folder, self.parts[0], x, **quiet)) for x in ("n1", "n2"))
        self.wa, self.wb = add(self.n.Worker(self.a, "p")), add(self.n.Worker(self.b, "d"))
        self.ca, self.cb = self.n.Conductor(self.a), self.n.Conductor(self.b)
        with open(self.a.slab, "rb") as f:
            self.layers = int.from_bytes(f.read(64)[40:44], "little")
        self.items = TOKENS // CHUNK * self.layers
        self.block_bytes = int(self.a.wait_log(r"slot_bytes=(\d+)")[1])

    def end(self):
        for c in (getattr(self, "ca", None), getattr(self, "cb", None)):
            if c:
                c.close()
        for part in reversed(self.parts):
            part.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def next(self):
        self.request += 1
        return self.request, self.n.keys(self.request % 251, BLOCKS)

    def write(self, request, keys):
        """The prompt's blocks are in A's pool afterwards."""
        before = self.a.metrics()[SEALED]
        assert self.ca.reserve(request, keys, TOKENS).status == 0
        assert self.wa.open(request, "w")[0] == "OK"
        self.wa.say(f"fill {request} 1 {request % 200}")
        self.wa.wait(f"filled {request}", 60)
        self.wa.say(f"raise {request} 1 {self.items}")
        self.wa.say(f"trailer {request} 1 7")
        self.wa.say(f"close {request} 1 w 0")
        self.ca.release(request)
        self.sealed(before + BLOCKS)

    def sealed(self, n):
        """Waits until A has sealed n blocks in all."""
        end = time.monotonic() + 30
        while self.a.metrics()[SEALED] < n:
            assert time.monotonic() < end, "blocks are not sealed"

    def get(self):
        """ms from Reserve to the worker's slots, of a prefix that is in the pool."""
        request, keys = self.next()
        self.write(request, keys)
        out = []
        for _ in range(20 * self.rounds):
            again, _ = self.next()
            start = time.perf_counter()
            r = self.ca.reserve(again, keys, TOKENS + 1)
            status, resident, _ = self.wa.open(again, "w")
            out.append((time.perf_counter() - start) * 1e3)
            assert status == "OK" and resident == r.resident_blocks == BLOCKS, (status, resident)
            self.wa.say(f"close {again} 1 w 1")
            self.ca.release(again)
        self.a.wait_quiet()
        return statistics.median(out)

    def put(self):
        """ms from a worker's question for a slot until it has it, one at a time; all are sealed at the end."""
        before, out = self.a.metrics()[SEALED], []
        for i in range(PUTS):
            start = time.perf_counter()
            self.wa.say(f"put {i + 1} {i} 0 {BLOCK}")
            m = self.wa.wait(r"putslot (\d+) status=(\w+)")
            out.append((time.perf_counter() - start) * 1e3)
            assert m[2] == "OK", m[0]
            self.wa.say(f"putdone {m[1]} 0")
        self.sealed(before + PUTS)
        return statistics.median(out)

    def lease(self, batch):
        """Blocks of put() leased and given back by one worker, pairs a second; the best of the rounds."""
        best = 0
        for _ in range(self.rounds):
            batches = max(LEASES // batch, 1)
            self.wa.say(f"leases {batches} 0 {batch} 4")
            m = self.wa.wait(r"leases short=(\d+) ns=(\d+)", 60)
            assert m[1] == "0", m[0]
            best = max(best, batches * batch / (int(m[2]) * 1e-9))
        self.a.wait_quiet()
        return best

    def receive(self, request, keys):
        """B asks A for the blocks; returns when that began. B keeps none of them."""
        start = time.perf_counter()
        b = self.cb.reserve(request, keys, TOKENS, receive_from=self.a)
        assert b.status == 0 and b.resident_blocks == 0, b
        self.wb.say(f"open {request} 1 r")
        return start

    def landed(self, request, start):
        done = self.cb.wait("flow_done", 60, match=lambda m: m.request == request)
        self.wb.wait(rf"trailer {request} 1 token=7", 60)
        seconds = time.perf_counter() - start
        self.wb.say(f"close {request} 1 r 0")
        self.cb.release(request)
        self.ca.release(request)
        return done.bytes, seconds

    def fetch(self):
        """GB/s of prefixes that A has and B has not."""
        got = []
        for _ in range(4 * self.rounds):
            request, keys = self.next()
            self.write(request, keys)
            again, _ = self.next()
            a = self.ca.reserve(again, keys, TOKENS)
            assert a.resident_blocks >= BLOCKS - 1, a
            assert self.wa.open(again, "w")[0] == "OK"
            self.wa.say(f"raise {again} 1 {self.items}")
            self.wa.say(f"trailer {again} 1 7")
            start = self.receive(again, keys)
            got.append(self.landed(again, start))
            self.wa.say(f"close {again} 1 w 0")
            self.b.wait_quiet()
        return sum(x[0] for x in got[1:]) / sum(x[1] for x in got[1:]) / 1e9

    def stream(self):
        """GB/s from the moment that the first item is raised until the reader has all."""
        got = []
        for _ in range(4 * self.rounds):
            request, keys = self.next()
            assert self.ca.reserve(request, keys, TOKENS).status == 0
            assert self.wa.open(request, "w")[0] == "OK"
            self.wa.say(f"fill {request} 1 {request % 200}")
            self.wa.wait(f"filled {request}", 60)
            self.receive(request, keys)
            self.wb.wait(f"opened {request} 1 r status=OK")
            start = time.perf_counter()
            for i in range(1, self.items + 1):
                self.wa.say(f"raise {request} 1 {i}")
            self.wa.say(f"trailer {request} 1 7")
            got.append(self.landed(request, start))
            self.wa.say(f"close {request} 1 w 0")
            self.b.wait_quiet()
        return sum(x[0] for x in got[1:]) / sum(x[1] for x in got[1:]) / 1e9


def main(args):
    p = argparse.ArgumentParser(prog="baton-bench kv", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=2, help="repetitions, default 2")
    opts = p.parse_args(args)
    bench = Bench(load_harness(), max(1, opts.rounds))
    try:
        put = bench.put()
        leases = {n: bench.lease(n) for n in (1, 16, 64)}
        get, fetch, stream = bench.get(), bench.fetch(), bench.stream()
    finally:
        bench.end()
    import wire
    raw = wire.plain_socket(256 << 10)[0]
    mb = BLOCKS * bench.block_bytes / 1e6
    print(f"{BLOCKS} blocks of {BLOCK} tokens, {bench.block_bytes} bytes each; a prefix is {mb:.1f} MB; plain socket {raw:.2f} GB/s")
    print(f"bench,kv_put,{put:.3f},ms,-,-")
    print(f"bench,kv_get,{get:.3f},ms,-,-")
    for n, value in leases.items():
        print(f"bench,kv_lease_pairs_in_batches_of_{n},{value:.0f},pairs/s,aim 20000,{value / 20000:.2f}")
    for name, value in (("kv_fetch", fetch), ("kv_stream", stream)):
        print(f"bench,{name},{value:.3f},GB/s,plain socket {raw:.2f},{value / raw:.2f}")
    return 0

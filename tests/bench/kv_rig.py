"""What baton-bench kv measures with: two real kvstores, and clients that do one thing at a time."""
import shutil
import statistics
import struct
import tempfile
import threading
import time

BLOCK, CHUNK, BLOCKS = 64, 512, 64  # tokens of a block, of an item; blocks of a prefix
TOKENS = BLOCK * BLOCKS
SLAB = "128MiB"
SEALED = "baton_kvstore_blocks_sealed_total"


class Rig:
    """etcd and kvstores A and B. nodes: tests/cluster/kvstore_nodes."""

    def __init__(self, nodes):
        self.n, self.parts, self.clients, self.lock, self.asked = nodes, [], [], threading.Lock(), 0
        self.folder = tempfile.mkdtemp(prefix="baton-kv-bench-")
        try:
            self.parts.append(nodes.Etcd(self.folder))
            self.a, self.b = self.kvstore("n1"), self.kvstore("n2")
            with open(self.a.slab, "rb") as f:
                self.layers = int.from_bytes(f.read(64)[40:44], "little")
            self.items = TOKENS // CHUNK * self.layers
            self.block_bytes = int(self.a.wait_log(r"slot_bytes=(\d+)")[1])
        except BaseException:
            self.end()
            raise

    def kvstore(self, node):
        kv = self.n.Kvstore(self.folder, self.parts[0], node, log__level="info", slab=SLAB)
        self.parts.append(kv)
        return kv

    def client(self):
        c = Client(self, len(self.clients))
        self.clients.append(c)
        return c

    def next(self):
        """A request's number that nobody has."""
        with self.lock:
            self.asked += 1
            return self.asked

    def kill_a(self):
        """kill -9, and a kvstore in its place; ms until it is ready. Clients from before are of no use any more."""
        self.a.p.kill()
        self.a.p.wait()
        self.parts.remove(self.a)
        for c in self.clients:
            c.end()
        self.clients = []
        start = time.perf_counter()
        self.a = self.kvstore("n1")
        return (time.perf_counter() - start) * 1e3

    def end(self):
        for c in self.clients:
            c.end()
        for part in reversed(self.parts):
            part.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Client:
    """A worker and a conductor's session at each kvstore."""

    def __init__(self, rig, i):
        n = rig.n
        self.rig, self.n_put, self.parts = rig, 0, []
        try:
            self.wa = self.add(n.Worker(rig.a, f"p{i}"))
            self.wb = self.add(n.Worker(rig.b, f"d{i}"))
            self.ca, self.cb = (n.Conductor(kv, name=f"conductor-{i}", incarnation=77 + i) for kv in (rig.a, rig.b))
        except BaseException:
            self.end()
            raise

    def add(self, worker):
        self.parts.append(worker)
        return worker

    def end(self):
        for c in (getattr(self, "ca", None), getattr(self, "cb", None)):
            if c:
                c.close()
        for worker in self.parts:
            worker.stop()
        self.parts = []

    def next(self):
        """A request and keys of a prefix of its own."""
        request = self.rig.next()
        return request, [struct.pack("<QI", request, i) + bytes(20) for i in range(BLOCKS)]

    def resident(self, keys):
        request = self.rig.next()
        r = self.ca.reserve(request, keys, TOKENS + 1)
        self.ca.release(request)
        assert r.status == 0, r
        return r.resident_blocks

    def write(self, request, keys):
        """The prompt's blocks are in A's pool afterwards."""
        assert self.ca.reserve(request, keys, TOKENS).status == 0
        assert self.wa.open(request, "w")[0] == "OK"
        self.wa.say(f"fill {request} 1 {request % 200}")
        self.wa.wait(f"filled {request}", 60)
        self.wa.say(f"raise {request} 1 {self.rig.items}")
        self.wa.say(f"trailer {request} 1 7")
        self.wa.say(f"close {request} 1 w 0")
        self.ca.release(request)
        end = time.monotonic() + 30
        while self.resident(keys) < BLOCKS:
            assert time.monotonic() < end, "blocks are not sealed"

    def get(self, keys):
        """(ms from Reserve to the worker's slots, blocks that were there)."""
        request = self.rig.next()
        start = time.perf_counter()
        r = self.ca.reserve(request, keys, TOKENS + 1)
        status, resident, _ = self.wa.open(request, "w")
        ms = (time.perf_counter() - start) * 1e3
        assert status == "OK" and resident == r.resident_blocks, (status, resident, r.resident_blocks)
        self.wa.say(f"close {request} 1 w 1")
        self.ca.release(request)
        return ms, resident

    def put(self, what=None):
        """ms from a worker's question for a slot until it has it. what: the command with its key, or a new key."""
        verb, rest = (what or f"putkey {self.rig.next():064x}").split(" ", 1)
        self.n_put += 1
        start = time.perf_counter()
        self.wa.say(f"{verb} {self.n_put} {rest} 0 {BLOCK}")
        m = self.wa.wait(r"putslot (\d+) status=(\w+)")
        ms = (time.perf_counter() - start) * 1e3
        assert m[2] == "OK", m[0]
        self.wa.say(f"putdone {m[1]} 0")
        return ms

    def lease(self, batches, batch):
        """Pairs a second of batches of blocks leased and given back, four under way."""
        self.wa.say(f"leases {batches} 0 {batch} 4")
        m = self.wa.wait(r"leases short=(\d+) ns=(\d+)", 60)
        assert m[1] == "0", m[0]
        return batches * batch / (int(m[2]) * 1e-9)

    def receive(self, request, keys):
        """B asks A for the blocks; returns when that began. B keeps none of them."""
        start = time.perf_counter()
        b = self.cb.reserve(request, keys, TOKENS, receive_from=self.rig.a)
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
        """(bytes, seconds) of a prefix that A has and B has not."""
        request, keys = self.next()
        self.write(request, keys)
        again = self.rig.next()
        a = self.ca.reserve(again, keys, TOKENS)
        assert a.resident_blocks >= BLOCKS - 1, a
        assert self.wa.open(again, "w")[0] == "OK"
        self.wa.say(f"raise {again} 1 {self.rig.items}")
        self.wa.say(f"trailer {again} 1 7")
        got = self.landed(again, self.receive(again, keys))
        self.wa.say(f"close {again} 1 w 0")
        return got

    def stream(self):
        """(bytes, seconds) from the moment that the first item is raised until the reader has all."""
        request, keys = self.next()
        assert self.ca.reserve(request, keys, TOKENS).status == 0
        assert self.wa.open(request, "w")[0] == "OK"
        self.wa.say(f"fill {request} 1 {request % 200}")
        self.wa.wait(f"filled {request}", 60)
        self.receive(request, keys)
        self.wb.wait(f"opened {request} 1 r status=OK")
        start = time.perf_counter()
        for i in range(1, self.rig.items + 1):
            self.wa.say(f"raise {request} 1 {i}")
        self.wa.say(f"trailer {request} 1 7")
        got = self.landed(request, start)
        self.wa.say(f"close {request} 1 w 0")
        return got


def rate(got):
    """GB/s of (bytes, seconds), the first left out: it opens the connection."""
    got = got[1:] or got
    return sum(x[0] for x in got) / sum(x[1] for x in got) / 1e9


median = statistics.median

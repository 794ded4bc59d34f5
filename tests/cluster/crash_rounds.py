"""A kvstore that is killed -9 again and again under mixed load, and an oracle of what it had sealed.

The kvstore (node n1) has a small slab above a small SSD tier, so that blocks are evicted, written
behind and promoted all the time. Its load: prompts computed or found (Writer), generated blocks put
(Putter), hand-offs to the kvstore of node n2 and from it (HandOff). Bytes of a block follow from its
key alone, so that whoever reads a block can tell whether it is the right one.

The oracle is the stream of block events: a block counts from the moment that the kvstore announced
it until it announced that it is gone. After a kill the blocks that had been there for more than a
second must be announced again, and every prefix that is served must have the right bytes.
"""
import os
import random
import re
import struct
import threading
import time

import grpc

import crash_losses
from kvstore_nodes import BLOCK, WAIT_S, Nodes, Worker, items, pb
from sanitizer import PATIENCE

SETTLED_S = 1.0  # sealed for so long: must survive
DEEPEST = 24     # blocks of a chain
PAUSE_S = 0.008  # between a client's steps: blocks shall grow old before they are evicted
POLICIES = ("second_use", "evict", "always")


def key(chain, block):
    return struct.pack("<II", chain, block) + bytes(23) + b"\1"


def chain_of(k):
    return struct.unpack("<II", k[:8])


class Gone(Exception):
    """The kvstore that we spoke with is no more."""


class Attached(Worker):
    """A worker whose waits end at once when its kvstore goes."""
    attached_to = None  # incarnation

    def _read(self):
        for line in self.p.stdout:
            with self.cond:
                m = re.match(r"attached inc=(\w+)", line)
                if m or line.startswith("detached"):
                    self.attached_to = int(m[1], 16) if m else None
                self.lines.append(line.rstrip())
                self.cond.notify_all()

    def wait(self, pattern, timeout=WAIT_S):
        end = time.monotonic() + timeout * PATIENCE
        with self.cond:
            while True:
                for i, line in enumerate(self.lines):
                    m = re.match(pattern, line)
                    if m:
                        del self.lines[:i + 1]
                        return m
                if self.attached_to is None and pattern != "attached":
                    raise Gone
                left = end - time.monotonic()
                assert left > 0, f"{self.name}: no /{pattern}/ in {self.lines[-20:]}"
                self.cond.wait(left)

    def again(self, kv):
        """Until it is attached to this kvstore."""
        end = time.monotonic() + WAIT_S * PATIENCE
        with self.cond:
            while self.attached_to != kv.inc:
                assert time.monotonic() < end, f"{self.name} does not attach: {self.lines[-20:]}"
                self.cond.wait(0.1)
            self.lines.clear()


class Oracle(threading.Thread):
    """What the kvstore says that it has: key -> when it said so."""

    def __init__(self, conductor):
        super().__init__(daemon=True)
        self.have, self.lock, self.ended = {}, threading.Lock(), threading.Event()
        self.method = conductor.channel.stream_stream("/baton.Kvstore/Blocks",
                                                      request_serializer=lambda m: m.SerializeToString(),
                                                      response_deserializer=pb.BlockEvents.FromString)
        self.until = time.monotonic() + WAIT_S * PATIENCE
        self.call = self.method(self.credit())
        self.start()

    def credit(self):
        yield pb.BlocksCredit(messages=65536)
        self.ended.wait()

    def run(self):
        try:
            for e in self.call:
                now = time.monotonic()
                with self.lock:
                    if e.reset:
                        self.have.clear()
                    for i in range(0, len(e.added), 36):
                        self.have.setdefault(e.added[i:i + 32], now)
                    for i in range(0, len(e.removed), 32):
                        self.have.pop(e.removed[i:i + 32], None)
        except Exception:  # noqa: BLE001 (grpc's)
            if self.call.code() == grpc.StatusCode.FAILED_PRECONDITION and time.monotonic() < self.until:
                time.sleep(0.01)  # the hello on the session's stream has not been read yet
                self.call = self.method(self.credit())
                self.run()
            # else the kvstore is gone

    def end(self):
        self.ended.set()
        self.call.cancel()
        self.join(5)

    def drained(self):
        """After the kill: until all that had been sent is read."""
        self.join(WAIT_S * PATIENCE)
        assert not self.is_alive(), "the stream of a dead kvstore does not end"

    def settled(self, at):
        with self.lock:
            return {k for k, t in self.have.items() if t < at - SETTLED_S}

    def keys(self):
        with self.lock:
            return set(self.have)


class Load(threading.Thread):
    """One client of the kvstore: step() over and over until the kvstore is gone or it is told."""

    def __init__(self, run, worker):
        super().__init__(daemon=True)
        self.run_, self.p, self.error, self.steps = run, worker, None, 0
        self.c = run.nodes.conductor(run.a)
        self.rng = random.Random(run.rng.random())
        self.start()

    def run(self):
        while not self.run_.over.is_set():
            try:
                self.step()
                self.steps += 1
                time.sleep(self.rng.expovariate(1 / PAUSE_S))
            except Gone:
                break
            except AssertionError as e:
                if not self.run_.over.is_set():
                    self.error = e
                break
        self.leave()

    def leave(self):
        self.c.close()

    def prompt(self, chain, blocks):
        """(request, keys, tokens) of a prompt with a private block behind."""
        return self.run_.next_request(), [key(chain, b) for b in range(blocks)], blocks * BLOCK + 3

    def some_chain(self, new=0.3):
        """A chain to compute: often one of the last ones, so that blocks are used again."""
        r = self.run_
        if self.rng.random() < new or r.chains == 0:
            with r.lock:
                r.chains += 1
                return r.chains
        back = min(r.chains - 1, int(self.rng.expovariate(1 / 40)))
        return r.chains - back


def compute(c, p, request, keys, tokens, seed):
    """A prompt from Reserve to Release; (status, resident blocks). Every block is checked."""
    r = c.reserve(request, keys, tokens)
    if r.status != 0:  # the small slab is full of what others hold
        c.release(request)
        return r.status, 0
    status, resident, _ = p.open(request, "w")
    if status == "OK":
        p.say(f"fill {request} 1 {seed}")  # what is not resident
        p.wait(f"filled {request}")
        p.say(f"raise {request} 1 {items(tokens)}")
        p.say(f"trailer {request} 1 7")
        p.say(f"check {request} 1 {seed}")
        bad = int(p.wait(rf"check {request} bad=(\d+)")[1])
        assert bad == 0, f"chain {seed}: {bad} wrong blocks of {len(keys)}, {resident} resident"
        p.say(f"close {request} 1 w 0")
    c.release(request)
    return 0, resident


class Writer(Load):
    def step(self):
        chain = self.some_chain()
        request, keys, tokens = self.prompt(chain, self.rng.randint(1, DEEPEST))
        compute(self.c, self.p, request, keys, tokens, chain)


class Putter(Load):
    """Generated blocks, one behind the other, as a decode worker writes them back."""

    def step(self):
        chain, first = self.some_chain(0.1), self.rng.randint(0, DEEPEST)
        for block in range(first, min(DEEPEST, first + 4)):
            put = self.run_.next_request()
            self.p.say(f"putkey {put} {key(chain, block).hex()} {block} {BLOCK}")
            if self.p.wait(rf"putslot {put} status=(\w+)")[1] != "OK":
                return
            self.p.say(f"putfill {put} {chain} {block}")
            self.p.say(f"putdone {put} 0")


class HandOff(Load):
    """Prompts computed on one node and decoded on the other; half of them this way, half that."""

    def __init__(self, run, worker):
        self.b, self.d = run.nodes.conductor(run.b), run.far
        super().__init__(run, worker)

    def leave(self):
        self.c.close()
        self.b.close()

    def step(self):
        chain = self.some_chain()
        request, keys, tokens = self.prompt(chain, self.rng.randint(1, DEEPEST))
        near = (self.run_.a, self.c, self.p)
        far = (self.run_.b, self.b, self.d)
        src, dst = (near, far) if self.rng.random() < 0.5 else (far, near)
        try:
            self.move(src, dst, request, keys, tokens, chain)
        finally:
            for kv, c, p in (near, far):
                if kv.p.poll() is None:
                    for mode in "wr":
                        p.say(f"close {request} 1 {mode} 1")  # says nothing if it is closed
                    c.release(request)

    def move(self, src, dst, request, keys, tokens, seed):
        (ka, ca, p), (_, cb, d) = src, dst
        if ca.reserve(request, keys, tokens).status != 0:
            return
        if cb.reserve(request, keys, tokens, receive_from=ka, keep=True).status != 0:
            return
        d.say(f"open {request} 1 r")
        if p.open(request, "w")[0] != "OK":
            return
        p.say(f"fill {request} 1 {seed}")
        p.wait(f"filled {request}")
        for i in range(1, items(tokens) + 1):
            p.say(f"raise {request} 1 {i}")
        p.say(f"trailer {request} 1 9")
        m = d.wait(rf"opened {request} 1 r status=(\w+)|revoke {request}")
        if m[1] != "OK" or not d.wait(rf"trailer {request} 1 (token=9)|revoke {request}")[1]:
            return
        d.say(f"check {request} 1 {seed}")
        bad = int(d.wait(rf"check {request} bad=(\d+)")[1])
        assert bad == 0, f"hand-off of chain {seed}: {bad} wrong blocks"
        p.say(f"close {request} 1 w 0")
        d.say(f"close {request} 1 r 0")


class CrashRun:
    """rounds: round() kills and restarts once. counts adds up over all of them."""

    def __init__(self, seed, slab="8MiB", ssd="32MiB"):
        self.rng = random.Random(seed)
        self.nodes, self.lock = Nodes(), threading.Lock()
        self.slab, self.ssd = slab, ssd
        self.requests = self.chains = 0
        self.over = threading.Event()
        self.counts = dict(kills=0, early=0, expected=0, there=0, made_room=0, served=0, chains=0, steps=0, bad=0)
        self.ready_ms = []
        self.expected = set()
        self.lost = {}       # reason -> blocks
        self.died, self.before, self.in_slab, self.early = 0, {}, set(), {}
        self.b = self.nodes.kvstore("n2", slab="16MiB", log__level="info")
        self.far = self.nodes.add(Attached(self.b, "d"))
        self.start_a()
        self.workers = [self.nodes.add(Attached(self.a, f"p{i}")) for i in range(4)]
        self.checker = self.workers[0]

    def next_request(self):
        with self.lock:
            self.requests += 1
            return self.requests

    def start_a(self, expect_ready=True):
        self.policy = self.rng.choice(POLICIES)
        start = time.monotonic()
        self.a = self.nodes.kvstore(
            "n1", slab=self.slab, expect_ready=expect_ready,
            kvstore__ssd__path=os.path.join(self.nodes.folder, "ssd"), kvstore__ssd__bytes=self.ssd,
            kvstore__ssd__write_policy=self.policy, kvstore__ssd__probe_ms="50ms")
        if expect_ready:
            self.ready_ms.append((time.monotonic() - start) * 1e3)

    def drop_a(self):
        self.a.p.kill()
        self.a.p.wait()
        self.nodes.made.remove(self.a)

    def kill(self):
        """Load for a moment, then the kill: self.expected is what must be there afterwards."""
        self.over.clear()
        control = self.nodes.conductor(self.a)
        oracle = Oracle(control)
        jobs = [Writer(self, self.workers[0]), Writer(self, self.workers[1]),
                Putter(self, self.workers[2]), HandOff(self, self.workers[3])]
        time.sleep(self.rng.uniform(1.2, 3.0) * min(PATIENCE, 2))
        died = self.a.p.poll()
        self.over.set()
        at, self.died = time.monotonic(), time.time()
        self.drop_a()
        self.before, self.in_slab = crash_losses.gone(self.a.log()), crash_losses.sealed(self.a.slab)
        self.early = {}
        assert died is None, f"the kvstore ended by itself: {died}\n{self.a.log()[-4000:]}"
        oracle.drained()
        self.expected = oracle.settled(at)
        oracle.end()
        control.close()
        for j in jobs:
            j.join(2 * WAIT_S * PATIENCE)
            assert not j.is_alive(), f"{type(j).__name__} does not end"
            self.nodes.made = [x for x in self.nodes.made if x not in (j.c, getattr(j, "b", None))]
            self.counts["steps"] += j.steps
            if j.error:
                raise j.error
        self.counts["kills"] += 1

    def early_kill(self):
        """A kill while the kvstore starts: adopts the slab, reads the index."""
        self.start_a(expect_ready=False)
        time.sleep(self.rng.uniform(0, 0.25))
        self.drop_a()
        self.early.update(crash_losses.gone(self.a.log()))
        self.counts["kills"] += 1
        self.counts["early"] += 1

    def check(self):
        """The blocks are there again, and what is served is right."""
        self.start_a()
        for w in self.workers:
            w.again(self.a)
        if "ev=slab_adopted" not in self.a.log():
            raise AssertionError(f"the slab was not adopted\n{self.a.log()[-3000:]}")
        self.counts["bad"] += int(self.a.wait_log(r"ev=slab_checked blocks=\d+ bad=(\d+)")[1])
        self.a.wait_metric("baton_ssd_up", 1)  # its index is read beside: blocks there are announced after it
        c = self.nodes.conductor(self.a)
        oracle = Oracle(c)
        begun = time.monotonic()
        while True:
            have = oracle.keys()
            since = {**self.early, **crash_losses.gone(self.a.log())}
            # A kvstore that starts makes room: it says which of the blocks that it has found it has evicted then.
            made_room = {k for k in self.expected - have if "evicted" in since.get(k[:8].hex(), ("", "", ""))[2]}
            lost = [crash_losses.reason(k, self.died, self.before, self.in_slab, since) for k in self.expected - have - made_room]
            waited = time.monotonic() - begun
            # What is lost for no good reason may come yet, on a busy machine.
            if not lost or waited > PATIENCE and all(map(crash_losses.untold, lost)) or waited > WAIT_S * PATIENCE:
                break
            time.sleep(0.1)
        self.counts["expected"] += len(self.expected)
        self.counts["there"] += len(self.expected & have) + len(made_room)
        self.counts["made_room"] += len(made_room)
        for why in lost:
            self.lost[why] = self.lost.get(why, 0) + 1
        chains = {}
        for k in have:
            chain, block = chain_of(k)
            chains.setdefault(chain, set()).add(block)
        some = sorted(chains)
        self.rng.shuffle(some)
        for chain in some[:40]:
            blocks = chains[chain]
            depth = next(i for i in range(DEEPEST + 1) if i not in blocks)
            self.serve(c, chain, depth)
        metrics = self.a.metrics()
        self.counts["bad"] += int(metrics['baton_ssd_errors_total{what="crc"}'])
        oracle.end()
        c.close()
        self.nodes.made.remove(c)

    def serve(self, c, chain, depth):
        """A request for a chain of which the first `depth` blocks are known to be there."""
        if depth == 0:
            return
        keys = [key(chain, b) for b in range(depth)]
        status, resident = compute(c, self.checker, self.next_request(), keys, depth * BLOCK + 3, chain)
        assert status == 0
        self.counts["served"] += resident
        self.counts["chains"] += 1

    def round(self):
        self.kill()
        while self.rng.random() < 0.25:
            self.early_kill()
        self.check()

    def finish(self):
        """Nothing is held by anybody at the end."""
        for kv in (self.a, self.b):
            kv.wait_quiet()

    def stop(self):
        self.nodes.end()


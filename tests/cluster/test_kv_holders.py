"""Holders of slots that die, stand still or are cut off in the middle of a message: all that they held
comes back, and nothing is reused under one that lives."""
import os
import signal
import socket
import threading
import time

import pytest

from kvstore_nodes import BLOCK, STATUS, Conductor, Nodes, items, keys

LEASES = 1000


@pytest.fixture
def nodes():
    n = Nodes()
    yield n
    n.end()


def put(p, number, byte, seed):
    """A generated block whose key is `byte` 32 times."""
    p.say(f"put {number} {byte} 0 {BLOCK}")
    assert p.wait(rf"putslot {number} status=(\w+)")[1] == "OK"
    p.say(f"putfill {number} {seed}")
    p.say(f"putdone {number} 0")


def compute(c, p, request, k, seed):
    r = c.reserve(request, k, len(k) * BLOCK + 3)
    if r.status == STATUS["ERR_EXHAUSTED"]:
        return False
    assert r.status == 0, r
    assert p.open(request, "w")[0] == "OK"
    p.say(f"fill {request} 1 {seed}")
    p.wait(f"filled {request}")
    p.say(f"raise {request} 1 {items(len(k) * BLOCK + 3)}")
    p.say(f"trailer {request} 1 7")
    p.say(f"check {request} 1 {seed}")
    assert p.wait(rf"check {request} bad=(\d+)")[1] == "0"
    p.say(f"close {request} 1 w 0")
    c.release(request)
    return True


def test_killed_with_a_thousand_leases(nodes):
    kv = nodes.kvstore("n1", slab="1MiB")
    c, p, other = nodes.conductor(kv), nodes.worker(kv, "p"), nodes.worker(kv, "q")
    for i in range(20):
        put(p, i + 1, i + 1, i + 1)
    kv.wait_metric('baton_pool_slots{state="sealed"}', 20)
    for i in range(LEASES):
        p.say(f"lease {i + 1} {1 + i % 20} 1")
    for i in range(LEASES):
        assert p.wait(rf"leased {i + 1} status=(\w+)")[1] == "OK"
    kv.wait_metric("baton_pool_leases", LEASES)
    for i in range(40):  # what is leased is not evicted
        compute(c, other, 100 + i, keys(i + 1, 12), i + 1)
    assert kv.metrics()["baton_pool_leases"] >= LEASES
    other.say("lease 1 1 20")
    assert other.wait(r"leased 1 status=(\w+) n=(\d+)")[2] == "20"
    other.say("unlease 1")
    p.kill()
    kv.wait_quiet()
    for i in range(40):
        if not compute(c, other, 200 + i, keys(50 + i, 12), i + 1):
            # The seal thread has the slots of prompts before this one. Once it is done, there is room.
            kv.wait_quiet()
            assert compute(c, other, 300 + i, keys(50 + i, 12), i + 1)
    kv.wait_quiet()


def test_stopped_and_woken(nodes):
    """BATON_TEST_STOP_S: how long it stands still, 2.5 s if not set, and until others have used slots often; the kvstore would
    kill it after 30."""
    kv = nodes.kvstore("n1", slab="1MiB")
    c, p, other = nodes.conductor(kv), nodes.worker(kv, "p"), nodes.worker(kv, "q")
    k = keys(1, 12)
    assert c.reserve(1, k, 12 * BLOCK + 3).status == 0
    assert p.open(1, "w")[0] == "OK"
    p.say("fill 1 1 77")
    p.wait("filled 1")
    p.p.send_signal(signal.SIGSTOP)
    c.release(1)  # the conductor has given up
    end, n = time.monotonic() + float(os.environ.get("BATON_TEST_STOP_S", 2.5)), 0
    while time.monotonic() < end or n <= 20:  # others take every slot that they can get
        # The same keys come round: what was written under them decides what they hold.
        compute(c, other, 1000 + n, keys(2 + n % 200, 12), 2 + n % 200)
        n += 1
        time.sleep(0.005)
    assert kv.metrics()['baton_pool_slots{state="writing"}'] + \
        kv.metrics()['baton_pool_slots{state="quarantine"}'] >= 13  # its own
    p.p.send_signal(signal.SIGCONT)
    p.wait("revoke 1 1")
    p.say("check 1 1 77")
    assert p.wait(r"check 1 bad=(\d+)")[1] == "0"  # nobody else has written there
    p.say("close 1 1 w 1")
    kv.wait_quiet()


class Cut:
    """A way to a kvstore's gRPC server that breaks after so many bytes of the client's."""

    def __init__(self, kv, after):
        self.kv, self.after = kv, after
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.rpc = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.name, self.slab, self.inc, self.log = kv.name, kv.slab, kv.inc, kv.log
        self.sent, self.cut = 0, threading.Event()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        client, _ = self.listener.accept()
        host, port = self.kv.rpc.rsplit(":", 1)
        server = socket.create_connection((host, int(port)))
        threading.Thread(target=self.back, args=(server, client), daemon=True).start()
        while self.sent < self.after:
            data = client.recv(min(4096, self.after - self.sent))
            if not data:
                break
            server.sendall(data)
            self.sent += len(data)
        for s in (server, client, self.listener):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()
        self.cut.set()

    def back(self, server, client):
        try:
            while data := server.recv(65536):
                client.sendall(data)
        except OSError:
            pass


def test_session_cut_inside_every_message(nodes):
    """hello, two reservations, a release: cut at places all over them."""
    kv = nodes.kvstore("n1", slab="1MiB")
    p = nodes.worker(kv, "p")
    reserved = 0
    for i, after in enumerate(range(40, 1700, 23)):
        way = Cut(kv, after)
        c = Conductor(way)
        try:
            for request in (10 * i + 1, 10 * i + 2):
                c.reserve(request, keys(i % 200 + 1, 8), 8 * BLOCK + 3)
                reserved += 1
            p.say(f"open {10 * i + 2} 1 w")
            c.release(10 * i + 1)
            way.cut.wait(0.5)  # else it is cut at the end
        except AssertionError:
            pass  # it was cut before
        c.close()
        p.say(f"close {10 * i + 2} 1 w 1")
    assert reserved > 20
    kv.wait_quiet()
    assert kv.metrics()["baton_kvstore_grants"] == 0
    c = nodes.conductor(kv)
    assert compute(c, p, 99999, keys(9, 8), 3)
    kv.wait_quiet()

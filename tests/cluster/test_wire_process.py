"""The wire process, in which a kvstore has UCX: it aborts, is killed, stands still, is attacked. The kvstore goes on."""
import hashlib
import hmac
import os
import random
import signal
import struct
import subprocess
import threading
import time

import pytest

import sanitizer
from conftest import scrape, wait_for
from leftovers import assert_nothing_left, settled
from local_cluster import start_time
from test_wire_strangers import Proxy
from wire_peers import ROOT, Peer, children

TOKENS, CHUNK, LAYERS = 512, 128, 4
ITEMS = TOKENS // CHUNK * LAYERS
LOSSES = "baton_kv_wire_process_losses_total"
SECRET = "a secret of the cluster, 32 bytes"
# A sanitizer reports SIGSEGV as a finding, whoever sent it.
ENDS = [signal.SIGABRT, signal.SIGKILL] + ([] if sanitizer.KIND else [signal.SIGSEGV])


@pytest.fixture
def pair():
    made = [Peer(name, seg=65536, slots=200, secret=SECRET) for name in "ab"]
    yield made
    for p in made:
        print(f"== {p.name}", *p.lines[-20:], *p.err[-30:], sep="\n")
    assert [p.stop() for p in made] == [0, 0]


def start(a, b, req, raised):
    a.grant(req, 1, TOKENS, CHUNK, req)
    b.recv(a, req, 1, TOKENS, CHUNK)
    a.say(f"raise {req} {raised}")


def whole(a, b, req):
    start(a, b, req, ITEMS)
    a.say(f"trailer {req} 1 0")
    b.wait(f"done {req}")
    b.ask(f"verify {req} {req}", f"verify {req} bad=0 crc_bad=0")
    b.wait(f"quiet {req}$")
    a.wait(f"send_end {req} OK")
    a.say(f"drop {req}")
    b.say(f"forget {req}")


def lose(p, signo):
    """The process is gone, and another one is there."""
    pid, before = p.wire_pid(), p.metrics()[LOSSES]
    assert pid != 0
    p.killed = True
    os.kill(pid, signo)
    wait_for(lambda: p.wire_pid() not in (0, pid) and p.metrics()[LOSSES] == before + 1, 60, "another wire process", every_s=0.02)


@pytest.mark.parametrize("signo", ENDS, ids=lambda s: s.name)
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_killed_in_a_transfer(pair, who, signo):
    a, b = pair
    p = a if who == "sender" else b
    whole(a, b, 1)
    free = a.usage()["free"], b.usage()["free"]
    start(a, b, 2, 5)
    b.wait("progress 2 5")
    lose(p, signo)
    b.wait("failed 2 ERR_PEER_LOST")
    b.wait("quiet 2$")  # nobody writes to the slots any more
    a.wait("send_end 2 ERR_PEER_LOST")
    b.ask("poison 2", "poisoned 2")
    a.say(f"raise 2 {ITEMS}")
    time.sleep(0.3)
    b.ask("checkpoison 2", "poison_changed 2 0$")
    a.say("drop 2")
    b.say("forget 2")
    assert (a.usage()["free"], b.usage()["free"]) == free
    whole(a, b, 3)
    assert (a.usage()["free"], b.usage()["free"]) == free
    p.logged("ev=wire_process_lost pid=", f"signal {int(signo)}")
    assert [x.p.poll() for x in pair] == [None, None]


def test_killed_again_and_again_under_load(pair):
    """Flows fail and others succeed; nothing is kept, no byte is wrong, the counters go on."""
    a, b = pair
    a.ask("auto 256 64 33", "auto")
    free = b.usage()["free"]
    rng = random.Random(7)
    for i in range(6):
        after = b.mark()
        b.say(f"storm a {a.addr} {a.inc} {1000 * (i + 1)} 60 256 64 33 1")
        time.sleep(rng.uniform(0.0, 0.2))
        lose(rng.choice(pair), rng.choice(ENDS))
        m = b.wait(r"storm done=(\d+) failed=(\d+)", 60, after)
        assert int(m[1]) + int(m[2]) == 60
    after = b.mark()
    b.say(f"storm a {a.addr} {a.inc} 90000 60 256 64 33 1")
    b.wait(r"storm done=60 failed=0 ", 60, after)
    assert b.usage()["free"] == free
    assert a.metrics()[LOSSES] + b.metrics()[LOSSES] == 6
    m = b.metrics()
    assert m["baton_kv_received_bytes_total"] > 0 and m["baton_kv_crc_errors_total"] == 0


def test_one_that_stands_still_is_replaced(pair):
    """As a peer that hangs: after two seconds."""
    a, b = pair
    start(a, b, 1, 5)
    b.wait("progress 1 5")
    began = time.monotonic()
    lose(b, signal.SIGSTOP)
    b.wait("failed 1 ERR_PEER_LOST")  # whoever notices first says why
    # It is asked every half second, so its last answer is as old as that, or older if it had to wait for a CPU.
    assert 0.7 < time.monotonic() - began
    b.logged("ev=wire_process_lost", "did not answer")
    b.wait("quiet 1$")
    a.wait("send_end 1")
    whole(a, b, 2)


def test_a_kvstore_that_stood_still_does_not_blame_it(pair):
    a, b = pair
    pid = b.wire_pid()
    os.kill(b.pid, signal.SIGSTOP)
    time.sleep(2.5)  # a wire process has two seconds to answer
    os.kill(b.pid, signal.SIGCONT)
    time.sleep(0.7)  # it is asked every half second
    assert b.wire_pid() == pid and b.metrics()[LOSSES] == 0
    whole(a, b, 1)


def test_it_ends_with_its_kvstore_and_not_before():
    p = Peer("a")
    wire = p.wire_pid()
    with open(f"/proc/{wire}/cmdline", "rb") as f:
        assert f.read().split(b"\0")[0] == b"wire_peer: wire"
    for signo in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:  # of a service manager or a terminal
        os.kill(wire, signo)
    time.sleep(0.3)
    assert p.wire_pid() == wire
    inherited = {os.readlink(f"/proc/{wire}/fd/{n}").split(":")[0] for n in os.listdir(f"/proc/{wire}/fd")}
    assert not any("etcd" in x or "/dev/shm" in x and "slab" in x for x in inherited)
    p.kill()
    wait_for(lambda: not start_time(wire), 60, "it has ended")


def test_it_is_of_no_use_to_others():
    kvstore = os.path.join(ROOT, os.environ.get("BUILD", "build"), "bin", "baton-kvstore")
    for args in [], ["1", "2"], ["1"] * 6, ["x"] * 6, ["1"] * 7:
        p = subprocess.run([kvstore, "--wire-process", *args], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                           text=True, timeout=60)
        assert p.returncode == 2 and "how a kvstore starts its wire process" in p.stderr, (args, p)


# ---- addresses that a member has damaged ----

def mac_of(hello, listener):
    """What kvstore/wire/member.c computes for a dialer's hello."""
    def part(b):
        return struct.pack("<I", len(b)) + b
    key = hmac.digest(SECRET.encode(), b"baton peer address 1\0", hashlib.sha256)
    numbers = struct.pack("<5Q", hello.incarnation, int(listener.inc, 16), hello.nonce, hello.card, 1)
    text = b"".join(part(x) for x in (hello.cluster.encode(), hello.name.encode(), listener.name.encode(), numbers,
                                      hello.ucx_address))
    return hmac.digest(key, text, hashlib.sha256)


def test_damaged_addresses_under_a_right_mac(pair):
    """UCX aborts on some of them. The kvstore that has taken them goes on, and serves others."""
    a, b = pair
    a.killed = True  # by UCX
    rng = random.Random(1)
    tried = []

    def hook(way, m):
        if way == "up" and m.WhichOneof("m") == "hello":
            address = bytearray(m.hello.ucx_address)
            for _ in range(rng.randrange(1, 4)):
                address[rng.randrange(len(address))] = rng.randrange(256)
            m.hello.ucx_address = bytes(address)
            m.hello.address_mac = mac_of(m.hello, a)
            tried.append(bytes(address))
        yield m
    proxy = Proxy(a, hook)
    d = Peer("d", seg=65536, slots=200, secret=SECRET)
    d.killed = True  # by what its peer makes of the address

    def losses():
        return a.metrics()[LOSSES] + d.metrics()[LOSSES]
    try:
        a.grant(1, 1, TOKENS, CHUNK, 1)
        req = 100
        while losses() < 2 and len(tried) < 200:
            n, req = len(tried), req + 1
            d.recv(proxy, req, 1, TOKENS, CHUNK)
            wait_for(lambda: len(tried) > n, 60, "an address is tried", every_s=0.02)  # noqa: B023 (called at once)
            time.sleep(0.2)
            proxy.calls[-1].cancel()  # some changes do no harm
            d.say(f"cancel {req}")
            d.wait(f"quiet {req}$")
            d.say(f"forget {req}")
        assert a.p.poll() is None and d.p.poll() is None
        print(f"{len(tried)} addresses, {a.metrics()[LOSSES]:.0f} and {d.metrics()[LOSSES]:.0f} processes lost")
        assert not any("did not prove that it belongs" in x for x in a.err), "the MAC was not the right one"
        assert losses() >= 1, "no address was one on which UCX ends: this shows nothing"
        wait_for(lambda: children(a.pid), 60, "a wire process")
        whole(a, b, 5)
    finally:
        proxy.stop()
        d.stop()


# ---- a whole cluster ----

def test_processes_killed_under_load(make_cluster):
    """The kvstores' processes stay; every answer is the undisturbed one; nothing is kept, and what was cached is found."""
    c = make_cluster()
    c.killed = True
    prompts = [f"Act {i}. " + "We few, we happy few, we band of brothers; " * 12 for i in range(6)]
    right = [c.complete(p, max_tokens=40)["choices"][0]["text"] for p in prompts]
    before = settled(c)
    kvstores = [d for d in c.status() if d["daemon"] == "kvstore"]
    wrong, done, over = [], [0], threading.Event()

    def client(seed):
        rng = random.Random(seed)
        while not over.is_set():
            i = rng.randrange(len(prompts))
            try:
                text = c.complete(prompts[i], max_tokens=40)["choices"][0]["text"]
            except Exception as e:  # what is said to the client counts as well
                text = repr(e)
            done[0] += 1
            if text != right[i]:
                wrong.append((i, text))

    threads = [threading.Thread(target=client, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    rng, killed = random.Random(3), set()  # one that stands still may be met again
    try:
        for signo in [*ENDS, signal.SIGSTOP] * 2:
            time.sleep(rng.uniform(0.2, 1.0))
            for pid in children(rng.choice(kvstores)["pid"])[:1]:
                os.kill(pid, signo)
                killed.add(pid)
        wait_for(lambda: done[0] > 10, 60, "answers")
        wait_for(lambda: all(children(d["pid"]) for d in kvstores), 60, "wire processes")
    finally:
        over.set()
        for t in threads:
            t.join(120 * sanitizer.PATIENCE)
    assert not wrong, wrong[:2]
    now = [d for d in c.status() if d["daemon"] == "kvstore"]
    assert [d["pid"] for d in now] == [d["pid"] for d in kvstores]

    def losses():
        return sum(scrape(d["http"])[LOSSES] for d in now)
    wait_for(lambda: losses() == len(killed), 60, f"{len(killed)} losses")
    again = c.complete(prompts[0], max_tokens=40)
    assert again["choices"][0]["text"] == right[0]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > again["usage"]["prompt_tokens"] // 2
    assert_nothing_left(c, before, 64 << 20)

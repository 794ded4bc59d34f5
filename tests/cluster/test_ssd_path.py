"""The SSD tier in real kvstores: prompts larger than the slab come back from the disk with the right
bytes, also after kill -9; a damaged disk costs a computation, never a wrong byte."""
import os
import signal
import time

import pytest

import crash_losses
import slow_disk
from crash_rounds import Oracle
from kvstore_nodes import BLOCK, LAYERS, STATUS, WAIT_S, Nodes, hand_off, items, keys, pb
from sanitizer import PATIENCE

N = 12  # blocks of a prompt


@pytest.fixture
def nodes():
    n = Nodes()
    yield n
    n.end()


def start(nodes, node="n1", policy="always", **over):
    folder = os.path.join(nodes.folder, f"ssd-{node}")
    sets = {"kvstore__ssd__path": folder, "kvstore__ssd__bytes": "64MiB",
            "kvstore__ssd__write_policy": policy, "kvstore__ssd__probe_ms": "50ms", **over}
    return nodes.kvstore(node, slab="320KiB", **sets), folder


def write(c, p, request, k, tokens, seed):
    """One prompt, computed as far as it is not resident and checked whole; its resident blocks."""
    end = time.monotonic() + WAIT_S * PATIENCE
    while (r := c.reserve(request, k, tokens)).status == STATUS["ERR_EXHAUSTED"]:
        assert time.monotonic() < end, r  # the slab is small: others still hold much of it
        time.sleep(0.02)
    assert r.status == 0, r
    st, resident, _ = p.open(request, "w")
    assert st == "OK" and resident == r.resident_blocks
    p.say(f"fill {request} 1 {seed}")
    p.wait(f"filled {request}")
    p.say(f"raise {request} 1 {items(tokens)}")
    p.say(f"trailer {request} 1 7")
    p.say(f"check {request} 1 {seed}")
    m = p.wait(rf"check {request} bad=(\d+)")
    assert m[1] == "0"
    p.say(f"close {request} 1 w 0")
    c.release(request)
    return resident


def settle(kv, blocks=None):
    """Until nothing waits for the disk (and, if said, so many blocks are on it)."""
    kv.wait_quiet()
    kv.wait_metric("baton_ssd_backlog", 0)
    if blocks is not None:
        kv.wait_metric("baton_ssd_blocks", blocks)


def fill(kv, c, p, chains):
    """Prompts of N blocks; all of them are on the disk afterwards. Only a few blocks may wait for the
    disk: a prompt is used again until it has taken them all."""
    request = 100
    for i in range(chains):
        end = time.monotonic() + WAIT_S * PATIENCE
        while kv.metrics()["baton_ssd_written_bytes_total"] < (i + 1) * N * 8192:
            write(c, p, request, keys(i + 1, N), N * BLOCK + 3, seed=i + 1)
            request += 1
            assert time.monotonic() < end, (i, kv.metrics())
    kv.wait_metric("baton_ssd_blocks", chains * N)


def test_ten_times_the_slab(nodes):
    kv, _ = start(nodes)
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    chains = -(-10 * kv.slots // N)
    assert kv.slots < 4 * N
    fill(kv, c, p, chains)
    assert kv.metrics()["baton_kvstore_blocks_evicted_total"] > 5 * kv.slots
    for i in range(chains):
        assert write(c, p, 50000 + i, keys(i + 1, N), N * BLOCK + 3, seed=i + 1) == N
    m = kv.metrics()
    assert m['baton_kvstore_ssd_loads_total{result="ok"}'] > 8 * kv.slots
    assert m['baton_kvstore_ssd_loads_total{result="failed"}'] == 0
    assert m["baton_ssd_read_bytes_total"] > 0 and m['baton_ssd_errors_total{what="crc"}'] == 0
    settle(kv)


def test_killed_and_started_again(nodes):
    kv, _ = start(nodes)
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    fill(kv, c, p, 5)
    for round_ in range(3):
        kv.stop(signal.SIGKILL)
        os.unlink(kv.slab)  # nothing of the shared memory is left
        c.close()
        p.kill()
        kv, _ = start(nodes)
        assert "ev=ssd_open" in kv.log() and f"blocks={5 * N}" in kv.log()
        c, p = nodes.conductor(kv), nodes.worker(kv, "p", inc=round_ + 2)
        for i in range(5):
            assert write(c, p, 1000 * (round_ + 1) + i, keys(i + 1, N), N * BLOCK + 3,
                         seed=i + 1) == N
        settle(kv)


def test_blocks_of_the_disk_are_announced(nodes):
    kv, _ = start(nodes)
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    fill(kv, c, p, 5)
    want = {k for i in range(5) for k in keys(i + 1, N)}
    have, stop = set(), []

    def events():
        yield pb.BlocksCredit(messages=1000)
        while not stop:
            time.sleep(0.05)

    call = c.channel.stream_stream("/baton.Kvstore/Blocks",
                                   request_serializer=lambda m: m.SerializeToString(),
                                   response_deserializer=pb.BlockEvents.FromString)(events())
    end = time.monotonic() + WAIT_S * PATIENCE
    for e in call:
        have |= {e.added[i:i + 32] for i in range(0, len(e.added), 36)}
        have -= {e.removed[i:i + 32] for i in range(0, len(e.removed), 32)}
        if have == want:
            break
        assert time.monotonic() < end, (len(have), len(want))
    stop.append(1)
    call.cancel()


def test_blocks_of_a_disk_that_fails_for_a_while_stay_announced(nodes, monkeypatch, tmp_path):
    """The slab gives up blocks while the disk fails. They are on the disk all the same, and of use when it works again:
    who has listened all the while knows them as well as who comes later."""
    fails = tmp_path / "fails"
    for name, value in slow_disk.environment(dict(os.environ), slow_disk.build(tmp_path), 2e9, str(fails)).items():
        monkeypatch.setenv(name, value)
    kv, _ = start(nodes)
    monkeypatch.undo()
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    fill(kv, c, p, 2)
    early = Oracle(c)
    want = {k for i in range(2) for k in keys(i + 1, N)}
    wait(lambda: early.keys() >= want, "the disk's blocks are announced")
    fails.write_text("0")
    i = 0
    while kv.metrics()["baton_ssd_up"] == 1 or "slab" in where(kv, want):
        write(c, p, 5000 + i, keys(i % 150 + 50, N), N * BLOCK + 3, seed=i % 150 + 50)
        i += 1
        assert i < 2000, kv.metrics()
    os.unlink(fails)
    kv.wait_metric("baton_ssd_up", 1)
    late = Oracle(nodes.conductor(kv))
    wait(lambda: late.keys() >= want, "they are there for who comes now")
    wait(lambda: early.keys() == late.keys(), "all know the same")
    for o in early, late:
        o.end()


def wait(check, what):
    end = time.monotonic() + WAIT_S * PATIENCE
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def where(kv, want):
    """Tiers that have one of these: the slab's headers tell."""
    short = {k[:8].hex() for k in want}
    return {"slab"} if crash_losses.sealed(kv.slab) & short else set()


def test_damaged_disk_costs_a_computation(nodes):
    kv, folder = start(nodes)
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    fill(kv, c, p, 5)
    kv.stop()
    c.close()
    p.kill()
    with open(os.path.join(folder, "blocks"), "r+b") as f:  # one bit of every 4 KiB page
        f.seek(0, 2)
        size = f.tell()
        for off in range(1 << 20, size, 4096):
            f.seek(off + 77)
            b = f.read(1)
            f.seek(off + 77)
            f.write(bytes([b[0] ^ 4]))
    kv, _ = start(nodes)
    c, p = nodes.conductor(kv), nodes.worker(kv, "p", inc=2)
    for i in range(5):
        assert write(c, p, 1000 + i, keys(i + 1, N), N * BLOCK + 3, seed=i + 1) == 0
    m = kv.metrics()
    assert m['baton_ssd_errors_total{what="crc"}'] > 0
    assert m["baton_ssd_up"] == 1


def test_receiver_reads_its_own_disk(nodes):
    ka = nodes.kvstore("n1")
    kb, _ = start(nodes, "n2", kvstore__eviction="lru")
    ca, cb, p, d = (nodes.conductor(ka), nodes.conductor(kb), nodes.worker(ka, "p"),
                    nodes.worker(kb, "d"))
    request, end = 1, time.monotonic() + WAIT_S * PATIENCE
    while kb.metrics()["baton_ssd_blocks"] < N:  # only a few may wait for the disk: used again
        hand_off(ka, kb, ca, cb, p, d, request, keys(1, N), N * BLOCK + 3, seed=1, keep=True)
        request += 1
        kb.wait_quiet()
        assert request < 100 and time.monotonic() < end, kb.metrics()
    for i in range(6):  # others take the slab
        hand_off(ka, kb, ca, cb, p, d, 200 + i, keys(10 + i, N), N * BLOCK + 3, seed=9, keep=True)
        settle(kb)
    ra, rb, done = hand_off(ka, kb, ca, cb, p, d, 500, keys(1, N), N * BLOCK + 3, seed=1)
    assert (ra, rb) == (N, N)
    assert done.segments == LAYERS  # the private block only
    assert kb.metrics()['baton_kvstore_ssd_loads_total{result="ok"}'] > 0


def test_configurations_that_cannot_be(nodes):
    kv, folder = start(nodes)
    other = nodes.kvstore("n2", expect_ready=False, kvstore__ssd__path=folder)
    assert other.p.wait(WAIT_S) == 1
    assert "in use by another kvstore" in other.log()
    bad = nodes.kvstore("n3", expect_ready=False, kvstore__ssd__path="/proc/1/nothing")
    assert bad.p.wait(WAIT_S) == 1
    assert "key=kvstore.ssd.path" in bad.log()
    wrong = nodes.kvstore("n4", expect_ready=False, kvstore__ssd__write_policy="sometimes")
    assert wrong.p.wait(WAIT_S) == 2
    assert "second_use, evict, always" in wrong.log()
    kv.wait_quiet()

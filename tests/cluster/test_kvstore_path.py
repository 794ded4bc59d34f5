"""Kvstores as processes: KV goes from a writer on one node to a reader on another, and everything comes
back whoever dies. The workers have no engine; slab, sockets, gRPC, UCX and etcd are real."""
import os
import re
import signal
import struct
import subprocess
import time
import urllib.request

import grpc
import pytest

import crash_losses
import sanitizer
from kvstore_nodes import BLOCK, LAYERS, STATUS, WAIT_S, Nodes, hand_off, keys, pb


# Of a wire process. A sanitizer reports SIGSEGV as a finding, whoever sent it.
ENDS = [signal.SIGABRT, signal.SIGKILL] + ([] if sanitizer.KIND else [signal.SIGSEGV])


@pytest.fixture
def nodes():
    n = Nodes()
    yield n
    n.end()


@pytest.fixture
def pair(nodes):
    ka, kb = nodes.kvstore("n1"), nodes.kvstore("n2")
    return (ka, kb, nodes.conductor(ka), nodes.conductor(kb), nodes.worker(ka, "p"),
            nodes.worker(kb, "d"))


def test_hand_off_and_reuse(pair):
    ka, kb = pair[:2]
    tokens = 10 * BLOCK + 5
    k = keys(1, 10)
    ra, rb, done = hand_off(*pair, 1, k, tokens, seed=7, keep=True)
    assert (ra, rb) == (0, 0)
    assert done.segments == 11 * LAYERS and done.bytes > 0
    assert 0 < done.first_ns <= done.last_ns
    for kv in (ka, kb):
        kv.wait_quiet()
        kv.wait_metric('baton_pool_slots{state="sealed"}', 10)
    # The same prompt: only the private last block is filled and moved.
    ra, rb, done = hand_off(*pair, 2, k, tokens, seed=7, keep=True)
    assert (ra, rb) == (10, 10)
    assert done.segments == LAYERS
    # Longer, in a chain that shares 10 blocks; a multiple of the block: the last is the writer's own.
    ra, rb, done = hand_off(*pair, 3, k + keys(2, 6), 16 * BLOCK, seed=7)
    assert (ra, rb) == (10, 10)
    assert done.segments == 6 * LAYERS
    for kv in (ka, kb):
        kv.wait_quiet()
    ka.wait_metric('baton_pool_slots{state="sealed"}', 16)
    kb.wait_metric('baton_pool_slots{state="sealed"}', 10)  # not kept: TRANSIT
    kb.wait_metric("baton_kv_received_bytes_total", ka.metrics()["baton_kv_sent_bytes_total"])


def test_the_longest_names(nodes):
    """node.id may have 128 characters, a kvstore's name is longer than that."""
    long = "n" * 127
    ka, kb = [nodes.kvstore(long + x, run_dir=os.path.join(nodes.folder, x)) for x in "ab"]
    pair = (ka, kb, nodes.conductor(ka), nodes.conductor(kb), nodes.worker(ka, "p"), nodes.worker(kb, "d"))
    _, _, done = hand_off(*pair, 1, keys(1, 10), 10 * BLOCK + 5, seed=7, keep=True)
    assert done.segments == 11 * LAYERS
    kb.wait_log("ev=wire_session_up.*" + ka.name)


def damage(kv, k):
    """Turns a bit over in the bytes of a sealed block, in the slab that is in use."""
    with open(kv.slab, "r+b", buffering=0) as f:
        slots, slot_bytes, block_bytes = struct.unpack("<IQQ", os.pread(f.fileno(), 20, 12))
        headers, _, _, data = struct.unpack("<4Q", os.pread(f.fileno(), 32, crash_losses.HEADERS_OFF))
        for i in range(slots):
            h = os.pread(f.fileno(), crash_losses.HEADER_BYTES, headers + i * crash_losses.HEADER_BYTES)
            if h[0] == crash_losses.SEALED and h[8:40] == k:
                at = data + i * slot_bytes + block_bytes // 2
                b = os.pread(f.fileno(), 1, at)
                os.pwrite(f.fileno(), bytes([b[0] ^ 4]), at)
                return
    raise AssertionError("the block is not in the slab")


def test_a_block_that_goes_bad_in_the_slab(pair):
    """The receiver of a hand-off notices; the sender looks at what it has and drops it: the next hand-off goes well."""
    ka, kb, ca, cb, p, d = pair
    k = keys(1, 10)
    tokens = 10 * BLOCK + 5
    hand_off(*pair, 1, k, tokens, seed=7)
    for kv in (ka, kb):
        kv.wait_quiet()
    ka.wait_metric('baton_pool_slots{state="sealed"}', 10)
    damage(ka, k[4])
    assert ca.reserve(2, k, tokens).resident_blocks == 10
    assert cb.reserve(2, k, tokens, receive_from=ka).status == 0
    d.say("open 2 1 r")
    d.wait(r"revoke 2|opened 2 1 r status=(?!OK)")
    d.say("close 2 1 r 1")
    kb.wait_log("CRC of block 4")
    ca.release(2)
    cb.release(2)
    for kv in (ka, kb):
        kv.wait_quiet()
    ka.wait_log("ev=block_bad")
    ra, _, done = hand_off(*pair, 3, k, tokens, seed=7)
    assert ra == 4 and done.segments == 11 * LAYERS


def test_all_resident_at_the_reader(pair):
    k = keys(1, 8)
    hand_off(*pair, 1, k, 8 * BLOCK, seed=3, keep=True)
    for kv in pair[:2]:  # sealing goes on behind the release, at either side
        kv.wait_quiet()
        kv.wait_metric('baton_pool_slots{state="sealed"}', 8)
    ra, rb, done = hand_off(*pair, 2, k, 8 * BLOCK, seed=3, keep=True)
    assert (ra, rb) == (7, 8)
    assert done.segments == 0 and done.first_ns == 0
    for kv in pair[:2]:
        kv.wait_quiet()


def test_many_hand_offs_leave_nothing(pair):
    def fds(kv):
        return len(os.listdir(f"/proc/{kv.p.pid}/fd"))

    hand_off(*pair, 999, keys(200, 3), 3 * BLOCK + 1, seed=1)
    for kv in pair[:2]:
        kv.wait_quiet()
    before = [fds(kv) for kv in pair[:2]]
    for i in range(1, 41):
        tokens = 1 + (i * 37) % 200
        hand_off(*pair, i, keys(i, tokens // BLOCK), tokens, seed=i, keep=i % 2 == 0)
    for kv in pair[:2]:
        kv.wait_quiet()
        assert kv.metrics()["baton_kv_crc_errors_total"] == 0
    end = time.monotonic() + WAIT_S  # connections of the metrics' reader end a moment later
    while any(fds(kv) > n + 2 for kv, n in zip(pair[:2], before)):  # one may have been under way then
        assert time.monotonic() < end, ([fds(kv) for kv in pair[:2]], before)
        time.sleep(0.05)


def test_writer_killed_then_next_epoch(nodes, pair):
    ka, kb, ca, cb, p, d = pair
    tokens, k = 20 * BLOCK, keys(1, 20)
    assert ca.reserve(1, k, tokens).status == 0
    assert cb.reserve(1, k, tokens, receive_from=ka, keep=True).status == 0
    assert p.open(1, "w")[0] == "OK" and d.open(1, "r")[0] == "OK"
    p.say("fill 1 1 5")
    p.wait("filled")
    p.say(f"raise 1 1 {2 * LAYERS + 1}")  # two whole chunks of 4 blocks, and a bit
    d.wait("bell")
    p.kill()
    assert ca.wait("grant_failed").status == STATUS["ERR_PEER_LOST"]
    cb.wait("grant_failed")
    d.wait("revoke 1 1")
    d.say("close 1 1 r 1")
    p2 = nodes.worker(ka, "p", inc=2)
    ka.wait_metric('baton_pool_slots{state="sealed"}', 8)
    # What was whole is found by the next epoch, whose reservation ends the first.
    a = ca.reserve(1, k, tokens, epoch=2)
    assert (a.status, a.resident_blocks) == (0, 8)
    assert ca.reserve(1, k, tokens, epoch=1).status == STATUS["ERR_STALE"]
    cb.release(1, 1)
    ca.release(1, 2)
    hand_off(ka, kb, ca, cb, p2, d, 2, k, tokens, seed=5, keep=True)
    for kv in (ka, kb):
        kv.wait_quiet()


def test_reader_killed_frees_its_transit(nodes, pair):
    ka, kb, ca, cb, p, d = pair
    tokens, k = 6 * BLOCK, keys(1, 6)
    ca.reserve(1, k, tokens)
    cb.reserve(1, k, tokens, receive_from=ka)
    assert p.open(1, "w")[0] == "OK" and d.open(1, "r")[0] == "OK"
    kb.wait_metric("baton_pool_transit_slots", 6)
    d.kill()
    ca.release(1)
    cb.release(1)
    p.wait("revoke 1 1")
    p.say("close 1 1 w 1")
    for kv in (ka, kb):
        kv.wait_quiet()


def test_conductor_gone_frees_everything(nodes, pair):
    ka, kb, ca, cb, p, d = pair
    tokens, k = 6 * BLOCK, keys(1, 6)
    ca.reserve(1, k, tokens)
    cb.reserve(1, k, tokens, receive_from=ka)
    assert p.open(1, "w")[0] == "OK" and d.open(1, "r")[0] == "OK"
    ca.close()  # its stream breaks
    cb.mute = True  # this one falls silent
    p.wait("revoke 1 1")
    assert cb.wait_end()[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - cb.said_s > 1.9
    d.wait("revoke 1 1")
    p.say("close 1 1 w 1")
    d.say("close 1 1 r 1")
    for kv in (ka, kb):
        kv.wait_quiet()


def test_sender_kvstore_killed(nodes, pair):
    ka, kb, ca, cb, p, d = pair
    tokens, k = 6 * BLOCK, keys(1, 6)
    ca.reserve(1, k, tokens)
    cb.reserve(1, k, tokens, receive_from=ka)
    assert p.open(1, "w")[0] == "OK" and d.open(1, "r")[0] == "OK"
    kb.wait_metric("baton_kv_peer_sessions", 1)
    ka.stop(signal.SIGKILL)
    assert cb.wait("grant_failed").status in (STATUS["ERR_PEER_LOST"], STATUS["ERR_UNAVAILABLE"])
    d.wait("revoke 1 1")
    p.wait("detached")
    d.say("close 1 1 r 1")
    cb.release(1)
    kb.wait_quiet()
    # It comes back in the same place: the slab that it left is made anew, the worker attaches.
    ka2 = nodes.kvstore("n1")
    assert ka2.slab == ka.slab and ka2.inc != ka.inc
    p.wait("attached")
    hand_off(ka2, kb, nodes.conductor(ka2), cb, p, d, 2, k, tokens, seed=8)


def wire_of(kv):
    """Its wire process."""
    end = time.monotonic() + WAIT_S
    while True:
        with open(f"/proc/{kv.p.pid}/task/{kv.p.pid}/children") as f:
            pids = f.read().split()
        if pids or time.monotonic() > end:
            return int(pids[0])
        time.sleep(0.02)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_wire_process_killed(nodes, pair, who):
    """Under a hand-off, again and again: the kvstores go on, with their caches, and hand on afterwards."""
    ka, kb, ca, cb, p, d = pair
    tokens, k = 10 * BLOCK + 5, keys(1, 10)
    hand_off(*pair, 1, k, tokens, seed=7, keep=True)
    victim = ka if who == "sender" else kb
    victim.killed = True
    for i, signo in enumerate(ENDS):
        req, more = 10 + i, keys(2 + i, 20)
        assert ca.reserve(req, more, 20 * BLOCK).status == 0
        assert cb.reserve(req, more, 20 * BLOCK, receive_from=ka, keep=True).status == 0
        assert p.open(req, "w")[0] == "OK" and d.open(req, "r")[0] == "OK"
        p.say(f"fill {req} 1 5")
        p.wait("filled")
        p.say(f"raise {req} 1 {2 * LAYERS + 1}")
        d.wait("bell")
        os.kill(wire_of(victim), signo)
        assert cb.wait("grant_failed", match=lambda m: m.request == req).status == STATUS["ERR_PEER_LOST"]
        d.wait(f"revoke {req} 1")
        d.say(f"close {req} 1 r 1")
        p.say(f"close {req} 1 w 1")
        ca.release(req)
        cb.release(req)
        for kv in (ka, kb):
            kv.wait_quiet()
        victim.wait_metric("baton_kv_wire_process_losses_total", i + 1)
        wire_of(victim)
        # What was sealed is there on both sides, and the rest of the prompt moves.
        assert hand_off(*pair, 100 + i, k, tokens, seed=7, keep=True)[:2] == (10, 10)
    assert ka.p.poll() is None and kb.p.poll() is None
    for kv in (ka, kb):
        kv.wait_quiet()


def test_hello_is_checked(nodes):
    kv = nodes.kvstore("n1")
    for over, word in (({"cluster": "x"}, "cluster"), ({"root_key": bytes(32)}, "root key"),
                       ({"layout_id": 1}, "KV layout"), ({"expect_incarnation": 1}, "incarnation"),
                       ({"version": 9}, "version"), ({"name": ""}, "empty name")):
        code, detail = nodes.conductor(kv, **over).wait_end()
        assert code == grpc.StatusCode.FAILED_PRECONDITION and word in detail, (over, code, detail)
    c = nodes.conductor(kv, hello=False)
    c.mute = True
    c.out.put(pb.ToKvstore(release=pb.Release(request=1, epoch=1)))
    assert c.wait_end()[0] == grpc.StatusCode.INVALID_ARGUMENT
    c = nodes.conductor(kv)
    h = c.wait("hello")
    assert (h.name, h.node, h.incarnation) == ("kvstore-n1", "n1", kv.inc)
    pool = c.wait("heartbeat").pool
    assert pool.slots_total == pool.slots_free == kv.slots


def test_blocks_tell_inventory_and_changes(nodes, pair):
    ka, kb, ca, cb, p, d = pair
    hand_off(*pair, 1, keys(1, 5), 5 * BLOCK + 1, seed=1)
    ka.wait_quiet()
    credit = iter([pb.BlocksCredit(messages=100)])
    hold = []

    def requests():
        yield next(credit)
        while not hold:
            time.sleep(0.05)

    call = ca.channel.stream_stream("/baton.Kvstore/Blocks",
                                    request_serializer=lambda m: m.SerializeToString(),
                                    response_deserializer=pb.BlockEvents.FromString)(requests())
    seen, seq, messages = set(), None, 0
    for m in call:
        if m.reset:
            seen, seq = set(), m.seq
        assert m.seq == seq and m.incarnation == ka.inc
        added = [m.added[i:i + 36] for i in range(0, len(m.added), 36)]
        removed = [m.removed[i:i + 32] for i in range(0, len(m.removed), 32)]
        assert not (added and removed)
        seq += len(added) + len(removed)
        seen |= {(a[:32], int.from_bytes(a[32:], "little")) for a in added}
        messages += 1
        if messages == 1:
            assert m.reset and seen == {(k, i) for i, k in enumerate(keys(1, 5))}
            hand_off(*pair, 2, keys(2, 3), 3 * BLOCK + 1, seed=2)
        if len(seen) == 8:
            break
    assert seen == {(k, i) for s, n in ((1, 5), (2, 3)) for i, k in enumerate(keys(s, n))}
    hold.append(1)
    call.cancel()


def test_second_kvstore_is_refused(nodes):
    kv = nodes.kvstore("n1")
    second = nodes.kvstore("n1", expect_ready=False)
    assert second.p.wait(WAIT_S) == 1 and "another running kvstore" in second.log()
    other = nodes.kvstore("n1", expect_ready=False, run_dir=os.path.join(nodes.folder, "other"))
    assert other.p.wait(WAIT_S) == 3 and "ERR_EXISTS" in other.log()
    same_dir = nodes.kvstore("n9", expect_ready=False, run_dir=kv.run_dir)
    assert same_dir.p.wait(WAIT_S) == 1 and "another kvstore runs in run_dir" in same_dir.log()
    assert kv.p.poll() is None and os.path.exists(kv.slab)
    left = [f for f in os.listdir("/dev/shm") if f.startswith(f"baton-t{os.getpid()}-")]
    assert left == [os.path.basename(kv.slab)]


def test_slab_that_does_not_fit(nodes):
    kv = nodes.kvstore("n1", slab="64TiB", expect_ready=False)
    assert kv.p.wait(WAIT_S) == 1
    assert "--shm-size" in kv.log() and "kvstore.slab_bytes" in kv.log()


def test_killed_kvstore_leaves_its_blocks(nodes, pair):
    """The next kvstore takes over the slab, bytes compared; workers attach to it by themselves."""
    ka, kb, ca, cb, p, d = pair
    k, tokens = keys(1, 10), 10 * BLOCK + 5
    hand_off(*pair, 1, k, tokens, seed=7)
    ka.wait_quiet()
    assert ca.reserve(2, keys(2, 4), 4 * BLOCK + 1).status == 0
    assert p.open(2, "w")[0] == "OK"  # killed while this is being written
    for round_ in range(3):
        ka.stop(signal.SIGKILL)
        ca.close()
        if round_ == 1:
            p.kill()
            p = nodes.worker(ka := nodes.kvstore("n1"), "p", inc=9)
        else:
            ka = nodes.kvstore("n1")
            p.wait("attached")
        assert "ev=slab_adopted" in ka.log()
        ka.wait_log(r"ev=slab_checked blocks=10 bad=0")
        ca = nodes.conductor(ka)
        assert hand_off(ka, kb, ca, cb, p, d, 10 + round_, k, tokens, seed=7)[0] == 10
        ka.wait_quiet()
        ka.wait_metric('baton_pool_slots{state="sealed"}', 10)


def test_slab_is_kept_if_asked(nodes):
    for round_ in range(2):
        kv = nodes.kvstore("n1", kvstore__slab_keep="true")
        c, p = nodes.conductor(kv), nodes.worker(kv, "p", inc=round_ + 1)
        if round_ == 1:
            kv.wait_log(r"ev=slab_checked blocks=3 bad=0")
        assert c.reserve(1, keys(1, 3), 3 * BLOCK + 1).resident_blocks == 3 * round_
        assert p.open(1, "w")[0] == "OK"
        p.say("fill 1 1 5")
        p.wait("filled 1")
        p.say(f"raise 1 1 {LAYERS}")
        p.say("trailer 1 1 9")
        p.say("check 1 1 5")
        assert p.wait(r"check 1 bad=(\d+)")[1] == "0"
        p.say("close 1 1 w 0")
        c.release(1)
        kv.wait_quiet()
        c.close()
        assert kv.stop() == 0
        assert os.path.exists(kv.slab)
        p.kill()
    os.unlink(kv.slab)


def test_whoever_reads_the_log_leaves(nodes):
    """As a container's log driver or `| tee` may: the next line finds a broken pipe."""
    kv = nodes.kvstore("n1")
    kv.stop()
    p = subprocess.Popen(kv.p.args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        line = b""
        while not (ready := re.search(rb"ev=ready rpc=\S+ http=(\S+)", line)):
            line = p.stderr.readline()
            assert line, p.wait()
        p.stderr.close()
        for _ in range(3):
            p.send_signal(signal.SIGHUP)  # is logged
            text = urllib.request.urlopen(f"http://{ready[1].decode()}/metrics", timeout=WAIT_S).read()
            assert b"baton_pool_slots" in text
    finally:
        p.terminate()
        assert p.wait(WAIT_S) == 0

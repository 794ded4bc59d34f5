"""The wire between kvstores, two or three processes on loopback: what arrives, and what is refused."""
import subprocess
import time

import grpc
import pytest

import sanitizer
from wire_peers import Peer, certificates, listening_ports, peers, tool  # noqa: F401

LAYERS = 4  # of the tool's default slab: 4 layers, segments of 8 KiB, blocks of 16 tokens


def items(tokens, chunk):
    return -(-tokens // chunk) * LAYERS


def transfer(src, dst, req, tokens, chunk, seed, first=0, epoch=1):
    """One flow, raised at once; returns its done line."""
    src.grant(req, epoch, tokens, chunk, seed)
    dst.recv(src, req, epoch, tokens, chunk, first)
    src.say(f"raise {req} {items(tokens, chunk)}")
    src.say(f"trailer {req} {req + 1000} 1")
    done = dst.wait(rf"done {req} token=(\d+) finished=(\d) bytes=(\d+) segments=(\d+)")
    dst.wait(rf"quiet {req}$")
    src.wait(rf"send_end {req} OK")
    assert int(done[1]) == req + 1000 and done[2] == "1"
    dst.ask(f"verify {req} {seed}", rf"verify {req} bad=0 crc_bad=0")
    dst.say(f"forget {req}")
    src.say(f"drop {req}")
    return done


@pytest.mark.parametrize("tokens,chunk,first", [
    (16, 16, 0), (1, 16, 0), (100, 32, 0), (100, 32, 1), (100, 32, 2), (100, 32, 6),
    (128, 128, 3), (320, 64, 19), (333, 48, 20)])
def test_contents_arrive(peers, tokens, chunk, first):
    a, b = peers("a"), peers("b")
    blocks = -(-tokens // 16)
    done = transfer(a, b, 7, tokens, chunk, 99, first)
    assert int(done[4]) == (blocks - first) * LAYERS
    assert int(done[3]) == (blocks - first) * LAYERS * 8192
    m = b.metrics()
    assert m['baton_kv_received_bytes_total'] == (blocks - first) * LAYERS * 8192
    assert m['baton_kv_segments_total{dir="received"}'] == (blocks - first) * LAYERS
    assert a.metrics()['baton_kv_segments_total{dir="sent"}'] == (blocks - first) * LAYERS


def test_everything_resident_needs_only_the_trailer(peers):
    a, b = peers("a"), peers("b")
    a.grant(3, 1, 100, 32, 5)
    b.recv(a, 3, 1, 100, 32, first=7)
    a.wait("lookup 3")
    assert b.ask("word 3", r"word 3 (\d+)")[1] == str(items(100, 32))
    assert not b.has("done 3")
    a.say("trailer 3 11 0")
    assert b.wait(r"done 3 token=11 finished=0 bytes=(\d+)")[1] == "0"


def test_items_follow_the_word_and_the_trailer_waits(peers):
    a, b = peers("a"), peers("b")
    a.grant(5, 2, 100, 32, 77)
    b.recv(a, 5, 2, 100, 32)
    a.wait("lookup 5")
    a.say("trailer 5 1 0")  # early: must not overtake the items
    for n in (1, 3, 4, 9, 15):
        after = b.mark()
        a.say(f"raise 5 {n}")
        b.wait(rf"progress 5 {n} at=", after=after)
        time.sleep(0.05)
        assert b.ask("word 5", r"word 5 (\d+)")[1] == str(n)
        assert not b.has("done 5")
    a.say("raise 5 16")
    b.wait("done 5")
    b.ask("verify 5 77", "verify 5 bad=0 crc_bad=0")


def test_both_directions_and_big_messages(peers):
    """Segments of 128 KiB go by rendezvous, several flows at a time, both ways at once."""
    opts = dict(seg=131072, slots=200)
    a, b = peers("a", **opts), peers("b", **opts)
    a.ask("auto 512 128 21", "auto")
    b.ask("auto 512 128 22", "auto")
    b.say(f"storm a {a.addr} {a.inc} 1 8 512 128 21 1")
    a.say(f"storm b {b.addr} {b.inc} 1 8 512 128 22 1")
    assert b.wait(r"storm done=(\d+) failed=0 bytes=(\d+)", 120)[1] == "8"
    assert a.wait(r"storm done=(\d+) failed=0", 120)[1] == "8"
    assert b.metrics()["baton_kv_peer_sessions"] == 2  # one in either direction


def test_open_before_the_grant_is_retried(peers):
    a, b = peers("a"), peers("b")
    b.recv(a, 9, 1, 64, 32)
    time.sleep(0.3)  # of two seconds
    assert not b.has("failed 9")
    a.grant(9, 1, 64, 32, 4)
    a.say("raise 9 8")
    a.say("trailer 9 1 0")
    b.wait("done 9")


def test_unknown_request_fails_after_two_seconds(peers):
    a, b = peers("a"), peers("b")
    start = time.monotonic()
    b.recv(a, 9, 1, 64, 32)
    b.wait("failed 9 ERR_NOT_FOUND .*not reserved")
    assert 1.9 < time.monotonic() - start
    b.wait("quiet 9")
    # the session is as good as before
    transfer(a, b, 10, 64, 32, 5)


def test_refusals_of_a_flow(peers):
    a, b = peers("a"), peers("b")
    a.grant(1, 5, 64, 32, 1)
    b.recv(a, 1, 4, 64, 32)
    b.wait("failed 1 ERR_STALE")
    a.grant(2, 1, 64, 32, 1)
    b.recv(a, 2, 1, 80, 32)
    b.wait("failed 2 ERR_MISMATCH")
    a.wait("send_end 2 ERR_MISMATCH")
    b.wait("quiet 2")
    transfer(a, b, 3, 64, 32, 5)


def test_sender_takes_the_grant_back(peers):
    a, b = peers("a"), peers("b")
    a.grant(4, 1, 64, 32, 1)
    b.recv(a, 4, 1, 64, 32)
    a.say("raise 4 3")
    b.wait("progress 4 3")
    a.say("abort 4")
    b.wait("failed 4 ERR_CANCELLED .*taken back")
    b.wait("quiet 4")
    a.wait("send_end 4 ERR_CANCELLED")
    transfer(a, b, 5, 64, 32, 5)


def test_receiver_cancels(peers):
    a, b = peers("a"), peers("b")
    a.grant(4, 1, 64, 32, 1)
    b.recv(a, 4, 1, 64, 32)
    a.say("raise 4 3")
    b.wait("progress 4 3")
    b.ask("cancel 4", "quiet 4")
    a.wait("send_end 4 ERR_CANCELLED")
    assert not b.has("failed 4") and not b.has("done 4")
    b.ask("poison 4", "poisoned 4")
    a.say("raise 4 8")
    time.sleep(0.3)
    b.ask("checkpoison 4", "poison_changed 4 0")
    transfer(a, b, 5, 64, 32, 5)


def test_corrupted_segment_is_never_committed(peers):
    a, b = peers("a"), peers("b")
    a.grant(6, 1, 128, 32, 3)
    a.ask("corrupt 6 3 2", "corrupted 6")  # block 3 is in chunk 1, layer 2: item 6
    b.recv(a, 6, 1, 128, 32)
    a.say("raise 6 16")
    a.say("trailer 6 1 0")
    b.wait("failed 6 ERR_DATA_LOSS .*block 3 layer 2")
    b.wait("quiet 6")
    assert int(b.ask("word 6", r"word 6 (\d+)")[1]) <= 6
    assert not b.has("done 6")
    a.wait("send_end 6 ERR_DATA_LOSS")
    assert b.metrics()["baton_kv_crc_errors_total"] == 1
    transfer(a, b, 7, 64, 32, 5)  # the peer is not to blame: the session stays
    assert b.metrics()["baton_kv_peer_sessions_lost_total"] == 0


@pytest.mark.parametrize("opts,why", [
    (dict(cluster="other"), "cluster.name"), (dict(root=2), "root key"),
    (dict(layers=5), "layout"), (dict(), "incarnation"), (dict(name="x"), "answered")])
def test_strangers_are_refused(peers, opts, why):
    b = peers("b")
    a = peers(opts.get("name", "a"), **{k: v for k, v in opts.items() if k != "name"})
    a.name = "a"
    b.recv(a, 1, 1, 64, 32, inc="0000000000001234" if why == "incarnation" else None)
    if why == "answered" and peers.transport != "ucx":  # its certificate says it before it can
        why = "no session"
        b.wait("failed 1 ERR_PEER_LOST")
        b.logged("its certificate does not name baton://test/kvstore/a")
    b.wait(f"failed 1 ERR_PEER_LOST .*{why}")
    b.wait("quiet 1")


def test_deadline(peers):
    a, b = peers("a"), peers("b")
    a.grant(1, 1, 64, 32, 5)
    b.recv(a, 1, 1, 64, 32, deadline_ms=400)
    a.say("raise 1 3")
    b.wait("failed 1 ERR_TIMEOUT")
    b.wait("quiet 1")
    transfer(a, b, 2, 64, 32, 5)
    assert b.metrics()["baton_kv_peer_sessions_lost_total"] == 0


def test_an_idle_session_is_closed_and_made_again(peers):
    idle_s = 0.7
    a, b = peers("a"), peers("b", idle=int(idle_s * 1000))
    for req in (1, 2):
        transfer(a, b, req, 64, 32, req)
        end = time.monotonic() + 60 * sanitizer.PATIENCE
        while b.metrics()["baton_kv_peer_sessions"] + a.metrics()["baton_kv_peer_sessions"] > 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert b.logged("wire_session_up", times=req) == req
    begun, ended = [], []
    for req in (3, 4, 5, 6):  # a session in use stays, however short the limit
        begun.append(time.monotonic())
        transfer(a, b, req, 64, 32, req)
        ended.append(time.monotonic())
        time.sleep(0.3)
    # On a busy machine it may have been idle for so long between the flows of two of them.
    long_pauses = sum(end - begin > idle_s - 0.1 for begin, end in zip(begun, ended[1:]))
    assert 3 <= b.logged("wire_session_up", times=3) <= 3 + long_pauses, (begun, ended)


def test_listen_address_must_be_ours_and_private():
    for addr, key in (("8.8.8.8", "kvstore.wire.allow_routable"),
                      ("10.99.98.97", "no interface"), ("eth0", "numeric address")):
        p = subprocess.run([tool(), f"listen={addr}"], stdin=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, text=True, timeout=60)
        assert p.returncode == 2 and key in p.stderr and "kvstore.wire.listen" in p.stderr


def test_thousands_of_flows_leave_nothing_behind(peers):
    n, kib = (3000, 512) if peers.transport == "ucx" else (1500, 2048)
    one = {"MALLOC_ARENA_MAX": "1"}  # with an arena a thread, what the allocator keeps of gRPC's goes up by megabytes
    a, b = peers("a", slots=100, env=one), peers("b", slots=100, env=one)
    a.ask("auto 48 16 3", "auto")
    warm = f"storm a {a.addr} {a.inc} 1 1000 48 16 3 1"
    b.ask(warm, "storm done=1000 failed=0", 120)
    ua, ub = a.usage(), b.usage()
    b.ask(f"storm a {a.addr} {a.inc} 5000 {n} 48 16 3 1", f"storm done={n} failed=0", 240)
    va, vb = a.usage(), b.usage()
    for u, v in ((ua, va), (ub, vb)):
        assert v["fds"] == u["fds"] and v["free"] == u["free"]
        if not sanitizer.KIND:  # a sanitizer keeps what is freed
            assert v["rss_kb"] - u["rss_kb"] < kib  # 20 and 330 were seen
    assert b.metrics()["baton_kv_peer_sessions"] == 1


def test_transports_must_be_the_same(certificates):  # noqa: F811
    a, b = Peer("a"), Peer("b", grpc=1)
    try:
        a.grant(1, 1, 64, 32, 1)
        b.recv(a, 1, 1, 64, 32)
        b.wait("failed 1 ERR_PEER_LOST .*kvstore.wire.transport is grpc at the peer and ucx here")
        b.wait("quiet 1")
    finally:
        assert {a.stop(), b.stop()} == {0}


def test_certificates_let_kv_cross_a_routable_address(certificates):  # noqa: F811
    """But for that the address must be ours, so what is seen is that it is no more refused for being routable."""
    def start(*more):
        p = subprocess.run([tool(), "name=a", "listen=8.8.8.8", "grpc=1", *more], stdin=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, text=True, timeout=60)
        assert p.returncode == 2
        return p.stderr
    assert "is a routable address" in start() and "kvstore.wire.transport: grpc with cluster.tls" in start()
    assert "no interface of this machine has the address 8.8.8.8" in start("tls=" + certificates.of("a"))


@pytest.mark.parametrize("first", [b"", b"junk", b"PROF" + b"\1\0\0\0" + b"\7" * 8, b"x" * 100000])
def test_a_stream_without_a_session_is_closed(first):
    """The port of KV over gRPC, asked by somebody who knows no session's nonce."""
    a, b = Peer("a", grpc=1), Peer("b", grpc=1)
    try:
        port, = listening_ports(a.pid) - {a.port}
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)])
        stream = channel.stream_stream("/baton.Peer/Segments")(iter([first]))
        with pytest.raises(grpc.RpcError) as e:
            next(stream)
        assert e.value.code() == grpc.StatusCode.NOT_FOUND
        channel.close()
        assert a.metrics()['baton_kv_dropped_messages_total{reason="garbled"}'] == 1
        transfer(a, b, 1, 64, 32, 1)
    finally:
        assert {a.stop(), b.stop()} == {0}

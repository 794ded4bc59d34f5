"""The wire when peers are killed, stopped, restarted or cut off in the middle. A third peer goes on in
every case, and after on_quiet nothing is written any more (poison)."""
import ctypes
import os
import re
import signal
import socket
import time

import pytest

import sanitizer
import wire_flips
from local_cluster import free_port
from wire_peers import TRANSPORTS, Peer, certificates, children, sockets, tcp_rows, transport_opts  # noqa: F401

BIG = dict(seg=131072, layers=4, slots=600)  # 1 MiB messages by rendezvous
TOKENS, CHUNK = 1024, 128                    # 64 blocks, 32 items of 8 blocks: 32 MiB a flow
ITEMS = TOKENS // CHUNK * 4
SLOTS = {"a": 180, "b": 330, "c": 240}       # each is paged in at the start: no more than a flow or two need


@pytest.fixture(params=TRANSPORTS)
def trio(request, certificates):  # noqa: F811
    """a and c send, b receives; c streams to b all the time."""
    made = [Peer(name, rpc=f"127.0.0.1:{free_port()}", **{**BIG, "slots": SLOTS[name]},
                 **transport_opts(request.param, certificates, name)) for name in "abc"]
    extra = []
    a, b, c = made
    c.ask("auto 256 64 33", "auto")
    yield a, b, c, extra
    codes = {}
    for p in made + extra:  # pytest shows it when the test has failed
        print(f"== {p.name}", *p.lines[-20:], *p.err[-20:], sep="\n")
        if p.p.poll() is None:
            p.signal(signal.SIGCONT)  # its wire process too: else the kvstore waits ten seconds for it
            codes[p.name] = p.stop()
    assert set(codes.values()) <= {0}, codes


class Background:
    """Flows from c to b while something happens to a; all must succeed."""

    def __init__(self, b, c, n=20, first=100000):
        self.b, self.c, self.n = b, c, n
        self.after = b.mark()
        b.say(f"storm c {c.addr} {c.inc} {first} {n} 256 64 33 1")

    def finish(self):
        m = self.b.wait(r"storm done=(\d+) failed=(\d+)", 120, self.after)  # said at its end
        assert (int(m[1]), int(m[2])) == (self.n, 0), [line for line in self.b.lines if line.startswith("failed ")]


def start_flow(a, b, req, raised, **kw):
    a.grant(req, 1, TOKENS, CHUNK, req)
    b.recv(a, req, 1, TOKENS, CHUNK, **kw)
    a.say(f"raise {req} {raised}")


def progress(b, req):
    return int(b.ask(f"word {req}", rf"word {req} (\d+)")[1])


def poison_holds(b, req, bg, a=None):
    """Slots of a quiet flow stay as they are while others transfer, also when a stopped sender goes on."""
    bg.finish()
    b.ask(f"poison {req}", f"poisoned {req}")
    others = Background(b, bg.c, 10, 200000)
    if a is not None:
        a.signal(signal.SIGCONT)
        a.wait(f"send_end {req} ERR_")
    others.finish()
    b.ask(f"checkpoison {req}", f"poison_changed {req} 0$")
    b.say(f"forget {req}")


def wait_metric(p, name, right):
    end = time.monotonic() + 60 * sanitizer.PATIENCE
    while not right(value := p.metrics()[name]):
        assert time.monotonic() < end, (p.name, name, value)
        time.sleep(0.05)


def whole_transfer(a, b, req):
    start_flow(a, b, req, ITEMS)
    a.say(f"trailer {req} 1 0")
    b.wait(f"done {req}")
    b.wait(f"quiet {req}$")
    b.ask(f"verify {req} {req}", f"verify {req} bad=0 crc_bad=0")
    b.say(f"forget {req}")


def wait_idle(*peers):
    """Until none of them takes a tenth of a core: what they had to do still is done then. One that turns in circles always
    takes more, also on a busy machine."""
    end = time.monotonic() + 60 * sanitizer.PATIENCE
    while True:
        begun, before = time.monotonic(), [p.usage()["cpu_s"] for p in peers]
        time.sleep(0.3)
        used = [(p.usage()["cpu_s"] - x) / (time.monotonic() - begun) for p, x in zip(peers, before)]
        if max(used) < 0.1:
            return
        assert time.monotonic() < end, used


def test_idle_processes_burn_no_cpu(trio):
    a, b, c, _ = trio
    bg = Background(b, c, 5)
    bg.finish()
    start_flow(a, b, 1, 3)  # a flow that waits for its writer
    b.wait("progress 1 3")
    wait_idle(a, b, c)
    b.ask("cancel 1", "quiet 1")


def test_peer_killed_while_idle(trio):
    a, b, c, _ = trio
    whole_transfer(a, b, 1)
    bg = Background(b, c)
    lost = b.metrics()["baton_kv_peer_sessions_lost_total"]
    a.kill()
    wait_metric(b, "baton_kv_peer_sessions_lost_total", lambda n: n > lost)
    b.recv(a, 2, 1, TOKENS, CHUNK)
    b.wait("failed 2 ERR_PEER_LOST")
    b.wait("quiet 2")
    bg.finish()


def test_sender_killed_mid_transfer(trio):
    a, b, c, _ = trio
    bg = Background(b, c)
    start_flow(a, b, 1, ITEMS - 4)  # not to its end, however late the kill comes
    b.wait(r"progress 1 \d+")
    a.kill()
    b.wait("failed 1 ERR_PEER_LOST")
    b.wait("quiet 1")
    assert progress(b, 1) < ITEMS
    poison_holds(b, 1, bg)


def test_receiver_killed_mid_transfer(trio):
    a, b, c, _ = trio
    start_flow(a, b, 1, ITEMS)
    b.wait(r"progress 1 \d+")
    b.kill()
    a.wait("send_end 1 ERR_PEER_LOST")
    a.say("drop 1")
    wait_metric(a, "baton_kv_peer_sessions", lambda n: n == 0)
    # a serves others as before
    a.grant(2, 1, 256, 64, 2)
    c.recv(a, 2, 1, 256, 64)
    a.say("raise 2 16")
    a.say("trailer 2 9 0")
    c.wait("done 2")


def test_restarted_on_the_same_port(trio):
    a, b, c, extra = trio
    whole_transfer(a, b, 1)
    bg = Background(b, c)
    old_inc = a.inc
    a.kill()
    again = Peer("a", **a.opts)
    extra.append(again)
    b.recv(again, 2, 1, TOKENS, CHUNK, inc=old_inc)
    b.wait("failed 2 ERR_PEER_LOST")
    b.wait("quiet 2")
    b.say("forget 2")
    b.recv(again, 3, 1, TOKENS, CHUNK, inc=old_inc)  # by now the port answers as somebody else
    b.wait("failed 3 ERR_PEER_LOST .*incarnation")
    b.wait("quiet 3")
    b.say("forget 3")
    whole_transfer(again, b, 4)
    bg.finish()


def stop_mid_segment(a, b, req, **kw):
    """Stops the sender at full speed: receives are outstanding at b. It gets a moment to run, again and again, until some items
    have come. All over again if that were all of them."""
    for _ in range(10):
        a.grant(req, 1, TOKENS, CHUNK, req)
        b.recv(a, req, 1, TOKENS, CHUNK, **kw)
        a.wait(f"lookup {req}$")
        a.signal(signal.SIGSTOP)
        a.say(f"raise {req} {ITEMS}")
        while progress(b, req) == 0 and not b.has(f"failed {req} "):
            a.signal(signal.SIGCONT)
            time.sleep(0.003)
            a.signal(signal.SIGSTOP)
        time.sleep(0.1)
        if 0 < progress(b, req) < ITEMS:
            return
        a.signal(signal.SIGCONT)
        b.say(f"cancel {req}")
        b.wait(f"quiet {req}$")
        b.say(f"forget {req}")
        a.wait(f"send_end {req} ")
        a.say(f"drop {req}")
        with a.cond, b.cond:
            a.lines.clear()
            b.lines.clear()
    raise AssertionError("never in the middle")


def test_sender_stopped_mid_segment(trio):
    a, b, c, _ = trio
    bg = Background(b, c)
    stop_mid_segment(a, b, 1)
    b.wait("failed 1 ERR_PEER_LOST .*nothing was heard")
    b.wait("quiet 1")
    poison_holds(b, 1, bg, a)
    a.wait("send_end 1 ERR_PEER_LOST")
    a.say("drop 1")
    whole_transfer(a, b, 2)


def test_deadline_with_a_stopped_sender_forces_the_endpoint(trio):
    """UCX cannot cancel the receive of an active message: the peer goes, a second flow with it."""
    a, b, c, _ = trio
    bg = Background(b, c)
    a.grant(2, 1, 64, 32, 2)
    b.recv(a, 2, 1, 64, 32)
    a.wait("lookup 2")
    stop_mid_segment(a, b, 1, deadline_ms=700)
    b.wait("failed 1 ERR_TIMEOUT")
    b.wait("quiet 1")
    b.wait("failed 2 ERR_PEER_LOST")
    b.wait("quiet 2")
    poison_holds(b, 1, bg, a)


def test_cancel_with_a_stopped_sender(trio):
    a, b, c, _ = trio
    bg = Background(b, c)
    stop_mid_segment(a, b, 1)
    b.say("cancel 1")
    b.wait("quiet 1")
    assert not b.has("failed 1") and not b.has("done 1")
    poison_holds(b, 1, bg, a)
    a.wait("send_end 1 ERR_")


def test_receiver_stopped_mid_segment(trio):
    a, b, c, _ = trio
    start_flow(a, b, 1, ITEMS)
    b.wait(r"progress 1 \d+")
    b.signal(signal.SIGSTOP)
    a.wait("send_end 1 ERR_PEER_LOST")
    a.say("drop 1")
    start_flow(a, c, 2, ITEMS)
    a.say("trailer 2 5 0")
    c.wait("done 2")
    a.wait("send_end 2 OK")
    a.say("drop 2")
    b.signal(signal.SIGCONT)
    b.wait("failed 1 ERR_PEER_LOST")
    b.wait("quiet 1")
    poison_holds(b, 1, Background(b, c, 1))
    whole_transfer(a, b, 3)


def test_abort_while_the_receiver_is_stopped(trio):
    a, b, c, _ = trio
    start_flow(a, b, 1, ITEMS)
    b.wait(r"progress 1 \d+")
    b.signal(signal.SIGSTOP)
    time.sleep(0.1)
    a.say("abort 1")
    a.wait("send_end 1 ERR_CANCELLED")
    a.say("drop 1")
    b.signal(signal.SIGCONT)
    b.wait("failed 1 ERR_(CANCELLED|PEER_LOST)")
    b.wait("quiet 1")


def test_a_stopped_peer_costs_no_cpu(trio):
    a, b, c, _ = trio
    for req in range(1, 6):
        stop_mid_segment(a, b, req)
        wait_idle(b)
        in_time = not b.has(f"failed {req} ")  # it still waits for the rest, as it does for two seconds
        b.wait(f"quiet {req}$")
        wait_idle(b)
        if in_time:
            return
        a.signal(signal.SIGCONT)
        a.wait(f"send_end {req} ")
        a.say(f"drop {req}")
        b.say(f"forget {req}")
    raise AssertionError("five times it took CPU for as long as the flow stood")


def test_short_stop_is_survived(trio):
    a, b, c, _ = trio
    stop_mid_segment(a, b, 1)
    time.sleep(0.4)
    a.signal(signal.SIGCONT)
    a.say("trailer 1 1 0")
    b.wait("done 1")
    b.ask("verify 1 1", "verify 1 bad=0 crc_bad=0")


def data_sockets(p, q):
    """(process, fd) of p's TCP connections to q, gRPC's left out. From /proc, no tools."""
    inode = {i: (pid, fd) for pid in [p.pid, *children(p.pid)] for i, fd in sockets(pid).items()}
    q_inodes = {i for pid in [q.pid, *children(q.pid)] for i in sockets(pid)}
    mine, theirs = {}, set()
    for r in tcp_rows():
        local, remote = (int(x.split(":")[1], 16) for x in r[1:3])
        if r[3] != "01" or {local, remote} & {p.port, q.port}:
            continue
        if r[9] in inode:
            mine[(local, remote)] = inode[r[9]]
        if r[9] in q_inodes:
            theirs.add((remote, local))
    return [mine[k] for k in mine if k in theirs]


def cut(pid, fd):
    """Ends another process' TCP connection under it, as a broken network would."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = libc.syscall(434, pid, 0)
    mine = libc.syscall(438, pidfd, fd, 0)
    if mine < 0:
        pytest.skip(f"pidfd_getfd: errno {ctypes.get_errno()}")
    s = socket.socket(fileno=mine)
    s.shutdown(socket.SHUT_RDWR)
    s.close()
    os.close(pidfd)


def test_connection_cut_mid_segment(trio):
    a, b, c, _ = trio
    bg = Background(b, c)
    stop_mid_segment(a, b, 1)  # so that the cut falls into the middle for sure
    fds = data_sockets(a, b)
    assert fds
    for pid, fd in fds:
        cut(pid, fd)
    a.signal(signal.SIGCONT)
    b.wait("failed 1 ERR_PEER_LOST")
    b.wait("quiet 1")
    a.wait("send_end 1 ERR_PEER_LOST")
    a.say("drop 1")
    poison_holds(b, 1, bg)
    whole_transfer(a, b, 2)  # over a new session


def test_the_cluster_says_a_peer_is_gone(trio):
    a, b, c, _ = trio
    bg = Background(b, c)
    stop_mid_segment(a, b, 1)
    b.say(f"peerdown a {a.inc}")
    b.wait("failed 1 ERR_PEER_LOST .*cluster")
    b.wait("quiet 1")
    poison_holds(b, 1, bg, a)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_sessions_leave_nothing_behind(transport, certificates):  # noqa: F811
    """With one arena of the allocator: with one a thread, what it keeps varies by more than what is looked for."""
    a, b = (Peer(name, env={"MALLOC_ARENA_MAX": "1"}, **{**BIG, "slots": 180}, **transport_opts(transport, certificates, name))
            for name in "ab")
    try:
        for i in range(1, 34):
            if i == 9:
                u = b.usage(), a.usage()  # warm
            b.say(f"peerdown a {a.inc}")
            a.grant(i, 1, 64, 32, i)
            b.recv(a, i, 1, 64, 32)
            a.say(f"raise {i} 8")
            a.say(f"trailer {i} 1 0")
            b.wait(f"done {i} ")
            b.wait(f"quiet {i}$")
            a.wait(f"send_end {i} OK")
            b.say(f"forget {i}")
            a.say(f"drop {i}")
        for before, after in zip(u, (b.usage(), a.usage())):
            assert after["fds"] <= before["fds"] + 2 and after["free"] == before["free"], (u, after)
            if sanitizer.KIND != "thread":  # it keeps what was done to each address
                # 150 KB a session. Of 75 sessions the values went up and down by 0.8 MB.
                assert after["rss_kb"] - before["rss_kb"] < 25 * 150, (u, after)
        assert {a.stop(), b.stop()} == {0}
    finally:
        a.kill()
        b.kill()


@pytest.mark.parametrize("what", [1, 2], ids=["in the middle of a message", "anywhere"])
def test_a_connection_breaks_under_a_write(what):
    """UCX 1.13.1 completes a message twice that is sent from where it lies, and ends with an assertion, when writing
    the rest of it is what finds the connection gone: ucx_socket.c keeps that from it."""
    a, b = (Peer(name, **{**BIG, "slots": SLOTS["a"]}) for name in "ab")
    try:
        assert not any("ev=wire_copies" in x for x in a.err)  # else it shows nothing
        for req in range(1, 65):
            start_flow(a, b, req, ITEMS)
            a.say(f"trailer {req} 1 0")
            b.wait(f"(progress|failed) {req} ")  # the break before may have met this flow
            a.say(f"break {what}")
            b.wait(f"(done|failed) {req} ")
            b.wait(f"quiet {req}$")
            a.wait(f"send_end {req} ")
            a.say(f"drop {req}")
            b.say(f"forget {req}")
            if req >= 8 and int(a.ask("breaks", r"breaks (\d+)")[1]) > 0:
                break  # where the other end reads fast, few writes are cut short
        a.say("break 0")
        assert int(a.ask("breaks", r"breaks (\d+)")[1]) > 0
        whole_transfer(a, b, 100)
        assert (a.stop(), b.stop()) == (0, 0)
    finally:
        a.kill()
        b.kill()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sessions_that_end_before_they_begin(transport, certificates):  # noqa: F811
    """Faster than the transfer thread takes turns: of most it hears of the beginning and of the end at once."""
    n = 60
    p = Peer("p", **BIG, **transport_opts(transport, certificates, "p"))
    try:
        before = p.usage()
        p.say("\n".join(f"recv q 127.0.0.1:1 {i:x} {i} 1 128 128 0 0\npeerdown q {i:x}" for i in range(1, n + 1)))
        for i in range(1, n + 1):
            p.wait(f"failed {i} ERR_PEER_LOST")
            p.wait(f"quiet {i}$")
            p.say(f"forget {i}")
        assert p.usage()["free"] == before["free"]
        assert p.stop() == 0
    finally:
        p.kill()


def test_a_peer_stands_still_during_wire_up():
    """Longer than the other waits for its proof. UCX 1.13.1 ended the one that stood still when it went on and found the
    other's endpoint closed, wherever in wire-up that was: sixteen pairs, stopped at as many moments, three times. Of every
    other pair the one that dials stands still, of the rest the one that listens."""
    pairs = [[Peer(f"{name}{i}", seg=8192, layers=4, slots=60) for name in "ab"] for i in range(16)]
    still = [(a, b)[i % 2] for i, (a, b) in enumerate(pairs)]
    try:
        for req in range(1, 4):
            for i, (a, b) in enumerate(pairs):
                b.say(f"peerdown {a.name} {a.inc}")
                a.grant(req, 1, 64, 32, req)
                b.recv(a, req, 1, 64, 32)
                time.sleep(0.0002 * (req * len(pairs) + i))
                still[i].signal(signal.SIGSTOP)
            time.sleep(1.4)
            for p in still:
                p.signal(signal.SIGCONT)
            for a, b in pairs:
                a.say(f"raise {req} 8")
                a.say(f"trailer {req} 1 0")
                b.wait(f"(done|failed) {req} ")
                b.wait(f"quiet {req}$")
                b.say(f"forget {req}")
        for a, b in pairs:
            a.grant(100, 1, 64, 32, 100)
            a.say("raise 100 8")
            a.say("trailer 100 1 0")
            b.recv(a, 100, 1, 64, 32)
            b.wait("done 100 ")
            b.ask("verify 100 100", "verify 100 bad=0 crc_bad=0")
        assert {p.stop() for pair in pairs for p in pair} == {0}
    finally:
        for a, b in pairs:
            a.kill()
            b.kill()


@pytest.mark.parametrize("what,n", [("payload", 40), ("header", 12)])
def test_bits_that_turn_over_on_the_way(what, n):
    """10,000 bits: tests/bench/kv_flips.py."""
    for opts in (wire_flips.SMALL, wire_flips.LARGE):
        flips, failed, crc_errors = wire_flips.run(opts, what, n, seed=n)
        assert failed == flips > 0.9 * n, (flips, failed)
        assert (crc_errors > 0) == (what == "payload")

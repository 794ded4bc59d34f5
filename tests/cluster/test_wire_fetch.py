"""Fetches between kvstores' wires: sealed blocks by their keys, what the sender lacks, ends in every state, and the
order in which classes leave."""
import signal
import time

import pytest

from sanitizer import PATIENCE
from wire_peers import certificates, peers  # noqa: F401

LAYERS = 4  # of the tool's default slab: 4 layers, segments of 8 KiB, blocks of 16 tokens
SEG = 8192


def finish(src, dst, req, seed, free_src, free_dst):
    """The blocks are right, and after the end nothing is held on either side."""
    dst.wait(rf"quiet {req}$")
    src.wait(r"want_end OK")
    dst.ask(f"verify {req} {seed}", rf"verify {req} bad=0 crc_bad=0")
    dst.say(f"forget {req}")
    assert (src.usage()["free"], dst.usage()["free"]) == (free_src, free_dst)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_blocks_arrive(peers, n):
    a, b = peers("a"), peers("b")
    free = b.usage()["free"]
    a.grant(5, 1, 20 * 16, 32, 99)
    b.fetch(a, 700, 5, 0, n)
    a.wait(rf"wanted 700 by=b n={n} have={n} class=1")
    b.wait(rf"offer 700 {'1' * n}$")
    done = b.wait(r"done 700 token=0 finished=0 bytes=(\d+) segments=(\d+)")
    assert int(done[1]) == n * LAYERS * SEG and int(done[2]) == n * LAYERS
    finish(a, b, 700, 99, free - 20, free)


def test_sender_says_what_it_lacks(peers):
    a, b = peers("a"), peers("b")
    a.grant(5, 1, 10 * 16, 32, 99)
    b.fetch(a, 700, 5, 6, 8)  # blocks 6 to 13 of 10
    b.wait(r"offer 700 11110000$")
    assert int(b.wait(r"done 700 .* segments=(\d+)")[1]) == 4 * LAYERS
    b.wait("quiet 700$")
    free = b.usage()["free"]
    b.fetch(a, 701, 5, 10, 3)  # nothing of it
    b.wait(r"failed 701 ERR_NOT_FOUND")
    b.wait("quiet 701$")
    assert b.usage()["free"] == free  # no slot was taken for it


def test_wrong_byte_is_never_used(peers):
    a, b = peers("a"), peers("b")
    a.grant(5, 1, 4 * 16, 32, 99)
    a.ask("corrupt 5 2 1", "corrupted 5")
    b.fetch(a, 700, 5, 0, 4)
    b.wait(r"failed 700 ERR_DATA_LOSS .*block 2 layer 1")
    b.wait("quiet 700$")
    a.wait("want_end ERR_DATA_LOSS")
    assert b.metrics()["baton_kv_crc_errors_total"] == 1


@pytest.mark.parametrize("who", ["receiver", "sender"])
@pytest.mark.parametrize("how", ["cancel", "kill", "stop"])
@pytest.mark.parametrize("state", ["unanswered", "offered", "begun"])
def test_ends_in_every_state(peers, state, how, who):
    """Asked, offered but not taken, and under way: whoever goes, the other lets go of everything."""
    if peers.transport != "ucx" and state != "begun":
        pytest.skip("KV has not gone over the transport yet")
    big = {"slots": 300, "seg": 65536, "inflight": 65536} if state == "begun" else {}
    a, b = peers("a", **big), peers("b", **big)
    free = b.usage()["free"]
    n = 256 if state == "begun" else 16
    a.grant(5, 1, n * 16, 32, 99)
    if state == "unanswered":
        a.ask("hold 1", "hold 1")
    elif state == "offered":
        b.ask("hold 1", "hold 1")
    b.fetch(a, 700, 5, 0, n)
    if state == "begun":
        b.wait(r"progress 700")
    elif state == "offered":
        b.wait(r"offer 700")
    else:
        a.wait(r"wanted 700")
    if how == "cancel":
        # A receiver cancels; a sender's core can only be told to leave by its cluster.
        b.say("cancel 700") if who == "receiver" else a.say(f"peerdown b {b.inc}")
    elif how == "kill":
        (b if who == "receiver" else a).kill()
    else:
        (b if who == "receiver" else a).signal(signal.SIGSTOP)
    if who == "sender" or how == "cancel":
        b.wait(r"quiet 700$|done 700")
        b.wait(r"quiet 700$")
        b.say("forget 700")
        assert b.usage()["free"] == free
    if who == "receiver" or how == "cancel":
        a.wait(r"want_end")
    if how == "stop":
        (b if who == "receiver" else a).signal(signal.SIGCONT)
        a.wait(r"want_end")
        b.wait(r"quiet 700$")


def test_offer_that_nobody_takes_ends(peers):
    a, b = peers("a"), peers("b")
    a.grant(5, 1, 64, 32, 99)
    b.ask("hold 1", "hold 1")
    b.fetch(a, 700, 5, 0, 4)
    b.wait("offer 700")
    a.wait("want_end ERR_TIMEOUT")
    b.wait(r"failed 700 ERR_TIMEOUT")


def test_another_incarnation_is_not_asked(peers):
    a, b = peers("a"), peers("b")
    a.grant(5, 1, 64, 32, 99)
    b.fetch(a, 700, 5, 0, 4, inc="00000000000000aa")
    b.wait(r"failed 700 ERR_PEER_LOST .*incarnation")
    assert not a.has("wanted")


def stop_when_begun(src, dst):
    """The sender stands still as soon as some of a flow has arrived. It gets a moment to run, again and again, because the
    whole flow may come before anybody here notices its beginning."""
    received = 'baton_kv_received_bytes_total'
    before, end = dst.metrics()[received], time.monotonic() + 60 * PATIENCE
    src.signal(signal.SIGSTOP)
    while dst.metrics()[received] == before:
        assert time.monotonic() < end
        src.signal(signal.SIGCONT)
        time.sleep(0.002)
        src.signal(signal.SIGSTOP)
    time.sleep(0.05)  # what is on its way arrives


@pytest.mark.parametrize("cls", [1, 2])
def test_hand_off_overtakes_what_was_asked_before(peers, cls):
    """A small hand-off that is asked for while a large fetch of the same peer is under way, and one that another peer asks
    for, are there long before it. The sender stands still while they are asked for: else the fetch may be over by then."""
    opts = {"slots": 600, "seg": 65536}
    a, b, c = peers("a", **opts), peers("b", **opts), peers("c", slots=16, seg=65536)
    n = 512  # 128 MiB
    a.grant(5, 1, n * 16, 32, 99)
    a.grant(6, 1, 16, 16, 7)
    a.grant(8, 1, 16, 16, 7)
    a.grant(10, 1, 16, 16, 7)
    for req in (6, 8, 10):
        a.say(f"raise {req} {LAYERS}")
        a.say(f"trailer {req} 1 1")
    # Sessions first, so that none of the waits below is for one.
    c.recv(a, 8, 1, 16, 16)
    b.recv(a, 10, 1, 16, 16)
    c.wait("quiet 8$")
    b.wait("quiet 10$")
    a.grant(9, 1, 16, 16, 7)
    a.say(f"raise 9 {LAYERS}")
    a.say("trailer 9 1 1")
    for fetch in range(700, 705):  # once more if it was over all the same
        b.fetch(a, fetch, 5, 0, n, cls)
        stop_when_begun(a, b)
        if not b.has(f"done {fetch} "):
            break
        a.signal(signal.SIGCONT)
        b.wait(f"quiet {fetch}$")
        b.say(f"forget {fetch}")
    b.recv(a, 6, 1, 16, 16)  # the same connection
    c.recv(a, 9, 1, 16, 16)  # another one
    for p in (b, c):
        p.usage()  # it has asked
    assert not b.has(f"done {fetch} ")
    a.signal(signal.SIGCONT)
    b.wait("done 6 ")
    c.wait("done 9 ")
    b.wait(f"done {fetch} ", timeout=60)
    with b.cond:
        at = {w: next(i for i, line in enumerate(b.lines) if line.startswith(w))
              for w in ("done 6 ", f"done {fetch} ")}
    # One layer of the fetch is 32 MiB. Behind it, the hand-off would have come after all four of them.
    assert at["done 6 "] < at[f"done {fetch} "]
    b.wait(f"quiet {fetch}$")
    b.ask(f"verify {fetch} 99", f"verify {fetch} bad=0 crc_bad=0")

"""The wire over several network cards: two kvstore wires on two machines (network namespaces) whose cards carry
so many Mbit/s, set down, cut and healed in the middle of flows."""
import time

import pytest

import netns
from sanitizer import PATIENCE
from wire_peers import Peer

LAYERS = 4
# a block is 512 KiB; addresses are not loopback: members have a secret
BIG = dict(seg=131072, layers=LAYERS, slots=160, secret="a secret of the cluster, 32 bytes")


@pytest.fixture(scope="module")
def world():
    netns.need()
    pair = netns.Pair(2)
    yield pair.machines
    pair.end()


@pytest.fixture
def machines(world):
    """Both cards whole again, 200 Mbit/s each."""
    for m, other in (world, reversed(world)):
        for card in (1, 2):
            m.link(card, "up")
            m.rate(card, 200)
            m.join(card, other)
    for m in world:
        for card in (1, 2):
            m.wait_link(card)
    return world


@pytest.fixture
def peers(machines):
    made = []

    def make(name, machine, cards, env=None, **opts):
        m = machines[machine]
        p = Peer(name, env=env, machine=m, listen=",".join(m.address(c) for c in cards), **{**BIG, **opts})
        made.append(p)
        return p

    yield make
    codes = {}
    for p in made:  # pytest shows it when the test has failed
        print(f"== {p.name}", *p.lines[-10:], *p.err[-20:], sep="\n")
        if p.p.returncode is None:
            codes[p.name] = p.stop()
    assert set(codes.values()) <= {0}, codes


def start(a, b, req, blocks, raised=None):
    tokens, items = blocks * 16, blocks // 8 * LAYERS
    a.grant(req, 1, tokens, 128, req)
    b.recv(a, req, 1, tokens, 128)
    a.say(f"raise {req} {items if raised is None else raised}")
    a.say(f"trailer {req} 1 0")


def finish(a, b, req, timeout=60):
    b.wait(f"done {req} ", timeout)
    b.wait(f"quiet {req}$")
    a.wait(f"send_end {req} OK")
    b.ask(f"verify {req} {req}", f"verify {req} bad=0 crc_bad=0")
    b.say(f"forget {req}")
    a.say(f"drop {req}")


def seconds(a, b, req, blocks):
    """One flow, checked; how long it took."""
    begin = time.monotonic()
    start(a, b, req, blocks)
    b.wait(f"done {req} ", 60)
    took = time.monotonic() - begin
    finish(a, b, req)
    return took


def of_card(p, what, card, more=""):
    return p.metrics()[f'baton_kv_card_{what}{{interface="card{card}"{more}}}']


def sent(p, card):
    return of_card(p, "bytes_total", card, ',dir="sent"')


def until(what):
    end = time.monotonic() + 60 * PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def lanes_up(a, b, cards):
    """A session's first path carries flows before the others are there."""
    until(lambda: all(of_card(p, "lanes", k) == 1 for p in (a, b) for k in cards))


def lines(p, event, card):
    return sum(f"ev={event} " in x and f"interface=card{card} " in x for x in p.err)


def nothing_lost(*both):
    for p in both:
        m = p.metrics()
        assert m["baton_kv_peer_sessions_lost_total"] == 0 and m["baton_kv_flows_failed_total"] == 0
        assert m['baton_kv_dropped_messages_total{reason="duplicate"}'] == 0
        assert m['baton_kv_dropped_messages_total{reason="garbled"}'] == 0


def slow(machines, mbit=80, cards=(1, 2)):
    """So slow that a busy machine, or an instrumented build, is not what limits a flow."""
    for m in machines:
        for card in cards:
            m.rate(card, mbit)


def test_one_flow_takes_both_cards(peers, machines):
    """As fast as the two together, because it is one flow over both: one card after the other would take as long as one alone.
    The best of six tries, because it is about time."""
    slow(machines)
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    c, d = peers("c", 0, [1]), peers("d", 1, [1])
    for p, q in ((a, b), (c, d)):  # sessions
        start(p, q, 100, 8)
        finish(p, q, 100)
    lanes_up(a, b, (1, 2))
    tries = []
    while len(tries) < 6 and not (tries and tries[-1] > 1.5):
        both = seconds(a, b, len(tries) + 1, 32)
        tries.append(seconds(c, d, len(tries) + 1, 32) / both)
    assert tries[-1] > 1.5, tries
    shares = [sent(a, k) / ((len(tries) * 32 + 8) * 524288) for k in (1, 2)]
    assert abs(sum(shares) - 1) < 1e-9 and 0.3 < shares[0] < 0.7, shares
    received = [of_card(b, "bytes_total", k, ',dir="received"') for k in (1, 2)]
    assert received == [sent(a, k) for k in (1, 2)]
    assert [of_card(p, "lanes", k) for p in (a, b) for k in (1, 2)] == [1] * 4
    nothing_lost(a, b)


def test_cards_carry_what_they_can(peers, machines):
    for m in machines:
        m.rate(1, 120)
        m.rate(2, 40)
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    for req in (1, 2):
        start(a, b, req, 64)
        finish(a, b, req)
    assert 1.8 < sent(a, 1) / sent(a, 2) < 5, (sent(a, 1), sent(a, 2))
    nothing_lost(a, b)


def test_a_hand_off_goes_first_on_both_cards(peers, machines):
    """A hand-off that is asked for while a smaller fetch is under way is done before it, over all cards. If the two took
    turns the fetch would be done first by far."""
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    start(a, b, 1, 8)  # a session
    finish(a, b, 1)
    a.grant(5, 1, 64 * 16, 128, 99)
    a.grant(2, 1, 80 * 16, 128, 2)
    a.say("raise 2 40")
    a.say("trailer 2 1 0")
    slow(machines, 8)  # the fetch would take 16 s
    b.fetch(a, 700, 5, 0, 64, 2)
    b.wait("offer 700")
    b.recv(a, 2, 1, 80 * 16, 128)
    a.wait("lookup 2$")
    slow(machines, 200)
    b.wait("done 700 ", 60)
    b.wait("done 2 ", 60)
    with b.cond:
        done = [x.split()[1] for x in b.lines if x.startswith("done ")]
    assert done == ["1", "2", "700"]
    b.ask("verify 700 99", "verify 700 bad=0 crc_bad=0")
    b.ask("verify 2 2", "verify 2 bad=0 crc_bad=0")
    assert min(sent(a, 1), sent(a, 2)) > 20 << 20
    nothing_lost(a, b)


@pytest.mark.parametrize("mine,theirs", [([1, 2], [2]), ([2], [1, 2]), ([2, 1], [1, 2]), ([1], [1, 2])])
def test_cards_of_one_network_find_each_other(peers, mine, theirs):
    a, b = peers("a", 0, mine), peers("b", 1, theirs)
    start(a, b, 1, 32)
    finish(a, b, 1)
    lanes_up(a, b, set(mine) & set(theirs))
    for k in set(mine) | set(theirs):
        for p, own in ((a, mine), (b, theirs)):
            if k in own:
                assert of_card(p, "lanes", k) == (k in mine and k in theirs)
    nothing_lost(a, b)


@pytest.mark.parametrize("how,card", [("link", 1), ("link", 2), ("path", 1), ("path_to_receiver", 2)])
def test_a_card_fails_in_mid_flow_and_comes_back(peers, machines, how, card):
    """link: one end is set down, which both see. path: nothing gets through, and both links are up."""
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    start(a, b, 100, 8)
    finish(a, b, 100)
    lanes_up(a, b, (1, 2))
    slow(machines, 16)  # the flow takes five seconds, so that it is met in the middle
    start(a, b, 1, 40)
    b.wait("progress 1 [1-9]")
    if how == "link":
        machines[1].link(card, "down")
    else:
        machines[0].cut(card, machines[1])
        if how == "path":
            machines[1].cut(card, machines[0])
    failed_s = time.monotonic()
    slow(machines, 200, [3 - card])
    finish(a, b, 1)
    for p in (a, b):
        until(lambda: of_card(p, "up", card) == 0)
        assert of_card(p, "failures_total", card) == 1
        assert of_card(p, "up", 3 - card) == 1 and of_card(p, "lanes", 3 - card) == 1
        until(lambda: lines(p, "wire_card_down", card) > 0)  # the log comes on a pipe of its own
        assert lines(p, "wire_card_down", card) == 1 and lines(p, "wire_card_down", 3 - card) == 0
    before = sent(a, card)
    start(a, b, 2, 8)  # while it is away
    finish(a, b, 2)
    assert sent(a, card) == before
    # Whoever has missed a path for a second blames the card: if its link were up again by then, it would go down once more.
    time.sleep(max(0, failed_s + 2.5 - time.monotonic()))
    if how == "link":
        machines[1].link(card, "up")
    else:
        machines[0].join(card, machines[1])
        machines[1].join(card, machines[0])
    until(lambda: of_card(a, "lanes", card) == 1 and of_card(b, "lanes", card) == 1)
    until(lambda: of_card(a, "up", card) == 1 and of_card(b, "up", card) == 1)
    start(a, b, 3, 16)
    finish(a, b, 3)
    assert sent(a, card) > before
    until(lambda: lines(a, "wire_card_up", card) and lines(b, "wire_card_up", card))
    assert lines(a, "wire_card_up", card) == 1 and lines(b, "wire_card_up", card) == 1
    assert a.metrics()["baton_kv_resent_segments_total"] > 0
    nothing_lost(a, b)


def test_a_lane_is_lost_with_more_under_way_than_can_be_told(peers, machines):
    """What a receiver has of a flow is told in a bit for each block of its chunks, from the first item that is not
    whole: here of chunks so long that four items take 32 MiB, more than a message holds. The session ends with that,
    and ended twice what it should end once."""
    slow(machines)
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    start(a, b, 1, 8)
    finish(a, b, 1)
    blocks, chunk = 8, 1 << 30
    a.grant(2, 1, blocks * 16, chunk, 2)
    b.recv(a, 2, 1, blocks * 16, chunk)
    a.wait("lookup 2")
    machines[0].cut(1, machines[1])
    a.say(f"raise 2 {LAYERS}")
    b.wait("failed 2 ERR_PEER_LOST a: a path failed, and too many segments")
    b.wait("quiet 2$")
    a.wait("send_end 2 ERR_PEER_LOST")
    b.say("forget 2")
    a.say("drop 2")
    machines[0].join(1, machines[1])
    start(a, b, 3, 8)  # in a session of its own
    finish(a, b, 3)


def test_both_cards_fail(peers, machines):
    """Nothing is left: the flow fails as over one card, and the next one is served."""
    slow(machines)
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    start(a, b, 1, 64)
    b.wait("progress 1 ([89]|[1-3][0-9]) ")
    machines[1].link(1, "down")
    until(lambda: of_card(b, "lanes", 1) == 0)
    machines[1].link(2, "down")
    b.wait("failed 1 ERR_PEER_LOST|done 1")
    b.say("cancel 1")
    b.wait("quiet 1$")
    b.say("forget 1")
    a.wait("send_end 1 ")
    a.say("drop 1")
    for card in (1, 2):
        machines[1].link(card, "up")
        machines[1].wait_link(card)
    until(lambda: of_card(b, "up", 1) == of_card(b, "up", 2) == 1)
    start(a, b, 2, 32)
    finish(a, b, 2)


def test_a_card_flaps_while_flows_go_both_ways(peers, machines):
    """Nothing is lost, sent twice or left over, whatever moment it falls into."""
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    for p, seed in ((a, 21), (b, 22)):
        p.ask(f"auto 128 128 {seed}", "auto")
    n = 0
    while n < 4:  # each machine's end of each card
        after = {p: p.mark() for p in (a, b)}
        b.say(f"storm a {a.addr} {a.inc} {1000 * (n + 1)} 60 128 128 21 1")
        a.say(f"storm b {b.addr} {b.inc} {1000 * (n + 1)} 60 128 128 22 1")
        stormy = lambda: not all(p.has("storm done=", after[p]) for p in after)  # noqa: E731, B023 (of this round)
        while stormy():
            machines[n % 2].link(1 + n // 2 % 2, "down")
            time.sleep(0.4)
            machines[n % 2].link(1 + n // 2 % 2, "up")
            until(lambda: all(of_card(p, "lanes", k) == 2 for p in (a, b) for k in (1, 2)) or not stormy())
            n += 1
        for p in (a, b):
            p.wait(r"storm done=60 failed=0", 120, after[p])
    print(f"{n} times down and up")
    nothing_lost(a, b)
    assert a.metrics()["baton_kv_resent_segments_total"] + b.metrics()["baton_kv_resent_segments_total"] > 0


def test_a_card_that_is_down_at_first_is_used_later(peers, machines):
    for m in machines:
        m.link(1, "down")
        m.wait_link(1, "down")
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    until(lambda: lines(a, "wire_card_down", 1) == 1 and of_card(a, "up", 1) == 0)
    start(a, b, 1, 32)
    finish(a, b, 1)
    assert sent(a, 1) == 0
    for m in machines:
        m.link(1, "up")
    until(lambda: of_card(a, "lanes", 1) == 1)
    start(a, b, 2, 64)
    finish(a, b, 2)
    assert sent(a, 1) > 0
    nothing_lost(a, b)


def test_no_card_for_the_peer(peers, machines):
    """Loopback there and cards here: nobody can help that, and the error says what to do."""
    b = peers("b", 1, [1, 2])
    lo = Peer("lo", machine=machines[0], listen="127.0.0.1", **BIG)
    try:
        b.recv(lo, 1, 1, 512, 128)
        b.wait("failed 1 ERR_PEER_LOST .*kvstore.wire.listen")
        b.wait("quiet 1")
    finally:
        assert lo.stop() == 0


def test_both_cards_down_at_start(machines):
    import subprocess
    from wire_peers import tool
    m = machines[0]
    for card in (1, 2):
        m.link(card, "down")
        m.wait_link(card, "down")
    p = subprocess.run(m.within + [tool(), f"listen={m.address(1)},{m.address(2)}"], stdin=subprocess.DEVNULL,
                       stderr=subprocess.PIPE, text=True, timeout=60)
    assert p.returncode == 2 and "kvstore.wire.listen" in p.stderr and "card1" in p.stderr, p.stderr


def test_ucx_spreads_a_message_over_two_connections(peers):
    """UCX itself can be told to use two interfaces for one message; its parts come out of order then."""
    env = {"UCX_NET_DEVICES": "card1,card2", "UCX_MAX_EAGER_LANES": "2"}
    a, b = (peers(n, i, [1], env=env, seg=1 << 20, slots=80) for i, n in enumerate("ab"))
    for req in range(10, 60):  # whether one overtakes the other is up to the machine
        start(a, b, req, 16)
        finish(a, b, req)
        if b.metrics()["baton_kv_unordered_messages_total"] > 0:
            break
    else:
        raise AssertionError("no part of a message came before an earlier one")
    a.grant(2, 1, 256, 128, 2)
    a.ask("corrupt 2 3 2", "corrupted 2")
    b.recv(a, 2, 1, 256, 128)
    a.say("raise 2 8")
    b.wait("failed 2 ERR_DATA_LOSS .*block 3 layer 2")
    b.wait("quiet 2")
    a.wait("send_end 2 ERR_DATA_LOSS")


def test_a_peer_that_goes_away_is_not_the_cards_fault(peers, machines):
    """Its lanes break one after the other, a moment before the session does."""
    slow(machines)
    a, b = peers("a", 0, [1, 2]), peers("b", 1, [1, 2])
    start(a, b, 1, 64, raised=28)  # of 32: not to its end, however late the kill comes
    b.wait("progress 1 ([89]|[12][0-9]) ")
    a.kill()
    b.wait("failed 1 ERR_PEER_LOST")
    b.wait("quiet 1")
    time.sleep(1.5)
    for card in (1, 2):
        assert of_card(b, "failures_total", card) == 0 and of_card(b, "up", card) == 1
        assert lines(b, "wire_card_down", card) == 0

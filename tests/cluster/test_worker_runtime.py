"""Workers against a real kvstore and engine; the test is the conductor."""
import json
import os
import random
import signal
import time

import pytest

from worker_node import (BLOCK, EXISTS, INVALID, OK, PEER_LOST, ROOT, STALE, UNAVAILABLE, Conductor, Node)

GOLDEN = json.load(open(os.path.join(ROOT, "tests", "golden", "shakespeare-llama-6m.json")))


@pytest.fixture(scope="module")
def node():
    n = Node()
    yield n
    codes = n.stop()
    assert codes["prefill"] == 0 and codes["decode"] == 0, codes


@pytest.fixture
def c(node):
    con = Conductor(node)
    yield con
    con.idle()
    con.close()


def rid():
    return random.getrandbits(63) | 1


def prompt(n, seed):
    r = random.Random(seed)
    return [r.randrange(100, 2000) for _ in range(n)]


def same_up_to_near_ties(got, want):
    """Equal, or different only from a place on where the reference itself nearly ties."""
    ids, gaps = want["greedy_ids"], want["greedy_top2_gap"]
    for i, (a, b) in enumerate(zip(got, ids)):
        if a != b:
            assert gaps[i] < 0.1, (i, a, b, gaps[i])
            return
    assert len(got) >= min(len(ids), 24)


@pytest.mark.parametrize("i", range(len(GOLDEN)))
def test_reference_tokens_both_and_apart(c, i):
    g = GOLDEN[i]
    ids = g["prompt_ids"]
    both = c.both(c.d, rid(), ids, 24)
    same_up_to_near_ties(both, g)
    assert c.apart(rid(), ids, 24) == both
    assert c.both(c.p, rid(), ids, 24) == both


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 128, 200])
def test_cold_warm_and_apart_are_the_same(c, n):
    ids = prompt(n, n)
    cold_id, warm_id, apart_id = rid(), rid(), rid()
    cold = c.apart(cold_id, ids, 20)
    assert len(cold) == 20
    c.resident(ids, (n - 1) // BLOCK)
    warm = c.apart(warm_id, ids, 20)
    both = c.both(c.d, apart_id, ids, 20)
    assert cold == warm == both
    first, second = c.p.find("prefill_done", cold_id)[0], c.p.find("prefill_done", warm_id)[0]
    assert first.cached_tokens == 0 and first.computed_tokens == n
    assert second.cached_tokens == (n - 1) // BLOCK * BLOCK  # the last token is always computed
    assert second.cached_tokens + second.computed_tokens == n
    assert first.start_ns <= first.last_compute_ns


def test_many_at_once_are_the_same_as_alone(c):
    jobs = [(rid(), prompt(40 + 13 * i, 1000 + i)) for i in range(8)]
    alone = [c.both(c.d, rid(), ids, 30) for _, ids in jobs]
    for r, ids in jobs:
        c.reserve(r, ids, wait=False)
        c.submit(c.d, r, ids, c.pb.DECODE, 30)
        c.submit(c.p, r, ids, c.pb.PREFILL, 30)
    assert [c.result(r, 30, [c.p, c.d]) for r, _ in jobs] == alone


def test_resubmission_continues_where_it_was(c):
    """Prompt + generated tokens under the next epoch: same text, penalties rebuilt from n_prompt."""
    ids = prompt(50, 7)
    how = dict(temperature=0.8, seed=99, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    r = rid()
    whole = c.both(c.d, r, ids, 30, **how)
    for cut in (1, 13, 14, 29):
        r = rid()
        rest = c.apart(r, ids + whole[:cut], 30 - cut, epoch=2, n_prompt=50, **how)
        assert whole[:cut] + rest == whole


def test_a_stop_id_ends_it(c):
    ids = prompt(33, 5)
    free = c.both(c.d, rid(), ids, 12)
    stop = free[6]
    want = free[:free.index(stop) + 1]
    for run in (lambda: c.apart(rid(), ids, 12, stop=[stop]), lambda: c.both(c.p, rid(), ids, 12, stop=[stop])):
        assert run() == want
    r = rid()
    assert c.apart(r, ids, 12, stop=[free[0]]) == free[:1]  # the first token ends it: nothing to decode
    assert c.p.tokens(r)[0].finish == c.pb.STOP
    r = rid()
    assert c.apart(r, ids, 1) == free[:1]
    assert c.p.tokens(r)[0].finish == c.pb.LENGTH


def test_generated_blocks_go_back_to_the_pool(c):
    ids = prompt(20, 11)
    text = c.apart(rid(), ids, 60)
    longer = ids + text[:59]
    blocks = len(longer) // BLOCK
    c.resident(longer, blocks)
    r = rid()  # and they hold what a prefill would have computed
    warm = c.both(c.p, r, longer, 20)
    assert c.p.find("prefill_done", r)[0].cached_tokens == blocks * BLOCK
    assert warm[0] == text[59]
    r = rid()
    c.kv.send(reserve=c.pb.Reserve(request=r, epoch=1, role=c.pb.WRITE, keys=c.keys(longer), n_tokens=len(longer),
                                   no_cache=True))
    c.submit(c.p, r, longer, c.pb.BOTH, 20)
    assert c.result(r, 20, [c.p]) == warm
    assert c.p.find("prefill_done", r)[0].cached_tokens == 0


def test_cancel_at_random_moments_leaves_nothing(c):
    rng = random.Random(3)
    ids = prompt(150, 21)
    want = c.both(c.d, rid(), ids, 16)
    for i in range(24):
        r = rid()
        both = i % 3 == 0
        c.reserve(r, ids, wait=False)
        workers = [c.d] if both else [c.p, c.d]
        for w, ph in ([(c.d, c.pb.BOTH)] if both else [(c.p, c.pb.PREFILL), (c.d, c.pb.DECODE)]):
            c.submit(w, r, ids, ph, 400)
        time.sleep(rng.random() * 0.15)
        order = [lambda: [w.send(cancel=c.pb.Cancel(request=r, epoch=1)) for w in workers], lambda: c.release(r)]
        if rng.random() < 0.5:
            order.reverse()
        for f in order:
            f()
        for w in workers:
            w.ended(r, seconds=10)
    c.idle()
    assert c.apart(rid(), ids, 16) == want


def test_cancel_before_the_reservation(c):
    r = rid()
    c.submit(c.p, r, prompt(30, 1), c.pb.PREFILL, 5)
    c.p.send(cancel=c.pb.Cancel(request=r, epoch=1))
    assert c.p.ended(r, seconds=5).status == OK
    r = rid()
    c.submit(c.d, r, prompt(30, 1), c.pb.DECODE, 5)
    e = c.d.ended(r, seconds=10)  # nobody reserves: the kvstore says so after two seconds
    assert e.status == -2 and "reserved" in e.detail, e


def test_a_deadline_ends_it(c):
    ids, r = prompt(40, 3), rid()
    c.reserve(r, ids, wait=False)
    c.submit(c.d, r, ids, c.pb.BOTH, 6000, deadline_ns=time.time_ns() + 300_000_000)
    e = c.d.ended(r, seconds=10)
    assert e.status == -6 and "deadline" in e.detail and len(c.d.tokens(r)) < 6000, e
    c.release(r)


def test_epochs(c):
    ids = prompt(40, 2)
    r = rid()
    c.reserve(r, ids, epoch=5, wait=False)
    c.submit(c.d, r, ids, c.pb.BOTH, 2000, epoch=5)
    c.d.wait(lambda: c.d.tokens(r, 5), "a token")
    c.submit(c.d, r, ids, c.pb.BOTH, 8, epoch=5)
    assert c.d.ended(r, 5).status == EXISTS
    c.submit(c.d, r, ids, c.pb.BOTH, 8, epoch=4)
    assert c.d.ended(r, 4).status == STALE
    n = len(c.d.find("ended", r, 5))
    c.reserve(r, ids, epoch=6, wait=False)
    c.submit(c.d, r, ids, c.pb.BOTH, 8, epoch=6)  # ends what epoch 5 still runs
    c.d.wait(lambda: len(c.d.find("ended", r, 5)) > n, "end of epoch 5")
    assert len(c.result(r, 8, [c.d], 6)) == 8
    c.release(r, 6)


@pytest.mark.parametrize("what,bad", [
    ("vocabulary", dict(tokens=[5, 2048])), ("n_prompt", dict(n_prompt=99)), ("context", dict(tokens=[7] * 8193)),
    ("max_new", dict(max_new=0)), ("temperature", dict(temperature=float("nan"))), ("stop_ids", dict(stop=[9999])),
    ("logprobs", dict(logprobs=21)), ("epoch", dict(epoch=0)), ("top_p", dict(top_p=1.5)),
])
def test_bad_submissions_are_refused_with_a_reason(c, what, bad):
    r = rid()
    args = dict(tokens=[5, 6, 7], max_new=4, epoch=1)
    args.update(bad)
    epoch = args["epoch"]
    c.submit(c.d, r, args.pop("tokens"), c.pb.BOTH, **args)
    e = c.d.ended(r, epoch)
    assert e.status == INVALID and what in e.detail, e


def test_a_broken_or_silent_session_frees_its_requests(node, c):
    ids = prompt(60, 4)
    for silent in (False, True):
        other = Conductor(node)
        r = rid()
        other.reserve(r, ids, wait=False)
        other.submit(other.d, r, ids, other.pb.BOTH, 5000)
        other.d.wait(lambda: other.d.tokens(r), "a token")
        if silent:
            other.d.silent = True
            other.d.wait(lambda: other.d.closed, "the worker ends the session", 8)
        other.close()
        c.idle()


def test_a_worker_takes_nobody_elses_conductor(node, c):
    import grpc
    s = c.d
    pb = node.pb
    hello = pb.ToWorker(hello=pb.SessionHello(version=1, cluster="other", name="x", root_key=b"0" * 32))
    ch = grpc.insecure_channel(node.member("decode").rpc, options=[("grpc.use_local_subchannel_pool", 1)])
    call = ch.stream_stream("/baton.Worker/Session", request_serializer=pb.ToWorker.SerializeToString,
                            response_deserializer=pb.FromWorker.FromString)(iter([hello]))
    with pytest.raises(grpc.RpcError) as e:
        list(call)
    assert e.value.code() == grpc.StatusCode.FAILED_PRECONDITION and "cluster" in e.value.details()
    ch.close()
    assert not s.closed


def test_preemption_changes_no_token():
    """Seven sequences in a worker with pages for about three: preempted ones are recomputed."""
    n = Node(decode={"engine.pages": 24})
    try:
        c = Conductor(n)
        jobs = [(rid(), prompt(30 + i, 500 + i)) for i in range(7)]
        alone = [c.both(c.p, rid(), ids, 90) for _, ids in jobs]
        for r, ids in jobs:
            c.reserve(r, ids, wait=False)
            c.submit(c.d, r, ids, c.pb.BOTH, 90)
        assert [c.result(r, 90, [c.d]) for r, _ in jobs] == alone
        assert n.metric("decode", "vllm:num_preemptions_total") > 0
        c.idle()
        r = rid()
        c.submit(c.d, r, prompt(300, 1), c.pb.BOTH, 100)
        e = c.d.ended(r)
        assert e.status == -9 and "engine.pages" in e.detail, e
        c.close()
    finally:
        n.stop()


def test_the_kvstore_goes_and_comes_back():
    n = Node()
    try:
        c = Conductor(n)
        ids = prompt(80, 6)
        want = c.both(c.d, rid(), ids, 300)
        r, waiting = rid(), rid()
        c.reserve(r, ids, wait=False)
        c.submit(c.d, r, ids, c.pb.BOTH, 300)
        c.d.wait(lambda: len(c.d.tokens(r)) > 5, "tokens")
        c.reserve(waiting, ids, wait=False)
        c.submit(c.d, waiting, ids, c.pb.DECODE, 300)  # never lands: nobody prefills
        time.sleep(0.3)
        n.procs["kvstore"].kill()
        n.procs["kvstore"].wait()
        assert c.d.ended(waiting).status == PEER_LOST
        assert c.d.ended(r).status == OK  # a row on engine pages goes on
        assert [t.token for t in c.d.tokens(r)] == want
        r = rid()
        c.submit(c.d, r, ids, c.pb.BOTH, 5)
        assert c.d.ended(r).status == PEER_LOST
        c.kv.close()
        n.start("kvstore")
        n.member("kvstore")
        c.kv = n.connect("kvstore")
        n.member("decode")
        n.member("prefill")
        assert c.apart(rid(), ids, 300) == want
        c.idle()
        c.close()
    finally:
        n.stop()


def test_sigterm_drains():
    n = Node()
    try:
        c = Conductor(n)
        ids = prompt(40, 8)
        r, late = rid(), rid()
        c.reserve(r, ids, wait=False)
        c.submit(c.d, r, ids, c.pb.BOTH, 400)
        c.d.wait(lambda: c.d.tokens(r), "a token")
        n.procs["decode"].send_signal(signal.SIGTERM)
        n.member("decode", state=2)
        c.submit(c.d, late, ids, c.pb.BOTH, 4)
        assert c.d.ended(late).status == UNAVAILABLE
        assert c.d.ended(r).status == OK
        assert len(c.d.tokens(r)) == 400
        assert n.procs["decode"].wait(10) == 0
        assert n.get("/baton/baton/members/decode/") == []
        c.close()
    finally:
        n.stop()

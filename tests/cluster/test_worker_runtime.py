"""Workers against a real kvstore and engine; the test is the conductor."""
import json
import os
import random
import signal
import time

import pytest

import sanitizer
from sanitizer import PATIENCE
from worker_node import (BLOCK, EXISTS, INVALID, MODEL, OK, PEER_LOST, ROOT, STALE, UNAVAILABLE, Conductor, Node)

GOLDEN = json.load(open(os.path.join(ROOT, "tests", "golden", "shakespeare-llama-6m.json")))


@pytest.fixture(scope="module", params=["null", "cpu"])
def node(request):
    """The null engine's tokens stand for the whole history, so that the paths are checked bit for bit on any machine;
    the CPU engine is as exact on some processors."""
    n = Node(request.param)
    yield n
    codes = n.stop()
    assert codes["prefill"] == 0 and codes["decode"] == 0, codes


@pytest.fixture
def c(node):
    con = Conductor(node)
    yield con
    con.idle()
    con.close()


@pytest.fixture
def exact(node):
    if not node.exact:
        pytest.skip("on this processor rows depend on their neighbours' number")


@pytest.fixture(scope="module")
def paced():
    n = Node("null")
    n.pace(5)
    yield n
    codes = n.stop()
    assert codes["prefill"] == 0 and codes["decode"] == 0, codes


@pytest.fixture
def slow(paced):
    """A step takes 5 ms: thousands of tokens last longer than whatever a test does meanwhile."""
    con = Conductor(paced)
    yield con
    con.idle()
    con.close()


def rid():
    return random.getrandbits(63) | 1


SEEDED = dict(temperature=0.8, seed=77)


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


def in_force(session):
    """What the worker's last heartbeat says of its steps with prompts beside rows."""
    beats = session.find("heartbeat")
    return beats and (round(beats[-1].load.mixed.step_ms, 3), round(beats[-1].load.mixed.gap_ms, 3))


def test_the_shortest_word_bounds_mixed_steps(node):
    """Of what conductors say of steps with prompts beside rows the shortest is in force, as long as their sessions last."""
    a = node.connect("decode", (75, 95))
    a.wait(lambda: a.find("heartbeat"), "its first heartbeat")
    first = a.find("heartbeat")[0].load.mixed
    assert (first.step_ms, first.gap_ms) == (75, 95)  # the hello said it
    old = node.connect("decode")
    b = node.connect("decode", (50, 0))
    for s in (a, old, b):
        s.wait(lambda s=s: in_force(s) == (50, 95), "all hear of it")
    assert node.metrics("decode")['baton_worker_mixed_step_seconds{of="step"}'] == 0.05
    b.mixed = (float("nan"), -1)  # outside of what the protocol allows: its session ends
    a.wait(lambda: in_force(a) == (75, 95), "that counts for nothing")
    b.close()
    b = node.connect("decode", (20, 200))
    a.wait(lambda: in_force(a) == (20, 95), "the shorter of each")
    b.close()
    a.wait(lambda: in_force(a) == (75, 95), "one that is gone says nothing")
    a.mixed = (0, 95)
    old.wait(lambda: in_force(old) == (0, 0), "a gap alone bounds nothing")
    for s in (a, old):
        s.close()


def test_own_limit_of_mixed_steps():
    n = Node("null", decode={"engine.mixed_step_ms": 40, "engine.mixed_gap_ms": 60})
    try:
        old = n.connect("decode")
        old.wait(lambda: in_force(old) == (40, 60), "its own limit")
        s = n.connect("decode", (75, 50))
        s.wait(lambda: in_force(s) == (40, 50), "the shorter of each")
        assert n.metrics("prefill")['baton_worker_mixed_step_seconds{of="step"}'] == 0  # nobody has told it
    finally:
        n.stop()


@pytest.mark.parametrize("i", range(len(GOLDEN)))
def test_reference_tokens_both_and_apart(c, i):
    g = GOLDEN[i]
    ids = g["prompt_ids"]
    runs = [c.both(c.d, rid(), ids, 24), c.apart(rid(), ids, 24), c.both(c.p, rid(), ids, 24)]
    if c.node.engine == "cpu":
        for got in runs:
            same_up_to_near_ties(got, g)
    if c.node.exact:
        assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 128, 200])
def test_cold_warm_and_apart_are_the_same(c, n, exact):
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


def test_many_at_once_are_the_same_as_alone(c, exact):
    jobs = [(rid(), prompt(40 + 13 * i, 1000 + i)) for i in range(8)]
    alone = [c.both(c.d, rid(), ids, 30) for _, ids in jobs]
    for r, ids in jobs:
        c.reserve(r, ids, wait=False)
        c.submit(c.d, r, ids, c.pb.DECODE, 30)
        c.submit(c.p, r, ids, c.pb.PREFILL, 30)
    assert [c.result(r, 30, [c.p, c.d]) for r, _ in jobs] == alone


def test_resubmission_continues_where_it_was(c, exact):
    """Prompt + generated tokens under the next epoch: same text, penalties rebuilt from n_prompt."""
    ids = prompt(50, 7)
    how = dict(temperature=0.8, seed=99, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    r = rid()
    whole = c.both(c.d, r, ids, 30, **how)
    for cut in (1, 13, 14, 29):
        r = rid()
        rest = c.apart(r, ids + whole[:cut], 30 - cut, epoch=2, n_prompt=50, **how)
        assert whole[:cut] + rest == whole


def test_a_stop_id_ends_it(c, exact):
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


def test_generated_blocks_go_back_to_the_pool(c, exact):
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


def test_cancel_at_random_moments_leaves_nothing(c, exact):
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
            w.ended(r)
    c.idle()
    assert c.apart(rid(), ids, 16) == want


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 130])
def test_choices_are_what_each_is_alone(c, n, exact):
    """n > 1: one prefill, forked by the worker that decodes; each choice is the run of that choice alone."""
    ids = prompt(n, 900 + n)
    alone = [c.both(c.p, rid(), ids, 20, choice=k, **SEEDED) for k in range(5)]
    assert len({tuple(a) for a in alone}) == 5
    r = rid()
    assert c.apart(r, ids, 20, n=5, **SEEDED) == alone
    assert [(t.choice, t.offset) for t in c.p.tokens(r)] == [(0, 0)]  # the others' first tokens are the decode side's
    assert len(c.p.find("prefill_done", r)) == 1 and not c.d.find("prefill_done", r)
    assert c.both(c.d, rid(), ids, 20, n=5, **SEEDED) == alone
    assert c.both(c.d, rid(), ids, 20, n=3, choice=2, **SEEDED) == alone[2:]  # numbered from `choice` on


def test_choices_stop_one_by_one(c, exact):
    ids = prompt(37, 31)
    alone = [c.both(c.p, rid(), ids, 16, choice=k, **SEEDED) for k in range(4)]
    for stop in (alone[2][5], alone[0][0]):  # in the middle of one; and the first choice's first token
        want = [a[:a.index(stop) + 1] if stop in a else a for a in alone]
        assert c.apart(rid(), ids, 16, n=4, stop=[stop], **SEEDED) == want
        assert c.both(c.d, rid(), ids, 16, n=4, stop=[stop], **SEEDED) == want
    assert c.apart(rid(), ids, 1, n=4, **SEEDED) == [a[:1] for a in alone]


def test_each_choice_has_a_chain_of_blocks(c, exact):
    ids = prompt(20, 41)
    for text in c.apart(rid(), ids, 60, n=3, **SEEDED):
        c.resident(ids + text[:59], (20 + 59) // BLOCK)


def test_cancel_ends_all_choices(c):
    rng = random.Random(5)
    ids = prompt(90, 51)
    for i in range(8):
        r = rid()
        c.reserve(r, ids, wait=False)
        workers = [c.d] if i % 2 else [c.p, c.d]
        for w in workers:
            ph = c.pb.BOTH if i % 2 else c.pb.PREFILL if w is c.p else c.pb.DECODE
            c.submit(w, r, ids, ph, 400 if c.node.engine == "null" else 3000, n=7, **SEEDED)
        time.sleep(rng.random() * 0.1)
        for w in workers:
            w.send(cancel=c.pb.Cancel(request=r, epoch=1))
            assert w.ended(r).status == OK
        c.release(r)
        assert len(c.d.find("ended", r)) == 1
    c.idle()


def used(pid):
    """(descriptors, KiB of private memory)"""
    rss = next(line for line in open(f"/proc/{pid}/status") if line.startswith("RssAnon"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(rss.split()[1])


def random_requests(c, rng, count):
    """Of all kinds, twenty at a time, four of ten cancelled at some moment."""
    runs = []

    def finish():
        r, workers = runs.pop(0)
        reserved = c.kv.wait(lambda: c.kv.find("reserved", r), "Reserved")[0]
        assert reserved.status == OK, reserved
        for w in workers:
            e = w.ended(r)
            assert e.status == OK, e
        c.release(r)
    for _ in range(count):
        r, ids, n = rid(), prompt(rng.randrange(1, 180), rng.randrange(40)), rng.choice((0, 0, 1, 2, 5, 16))
        workers = rng.choice(([c.d], [c.p], [c.p, c.d]))
        c.reserve(r, ids, wait=False)
        for w in workers:
            ph = c.pb.BOTH if len(workers) == 1 else c.pb.PREFILL if w is c.p else c.pb.DECODE
            c.submit(w, r, ids, ph, rng.randrange(1, 120), n=n, prompt_logprobs=ph != c.pb.DECODE and n == 0, **SEEDED)
        runs.append((r, workers))
        if rng.random() < 0.4:
            r, workers = rng.choice(runs)
            for w in workers:
                w.send(cancel=c.pb.Cancel(request=r, epoch=1))
        if len(runs) == 20:
            finish()
    while runs:
        finish()
    c.idle()


def test_a_thousand_requests_with_cancels_leave_nothing(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # with an arena a thread, what the allocator keeps goes up and down
    small = {"engine.pages": 60, "engine.max_slots": 12}  # all of them touched soon
    n = Node("null", prefill=small, decode=small)
    try:
        c, rng, seen = Conductor(n), random.Random(9), []
        for _ in range(6):
            random_requests(c, rng, 170)
            seen.append([used(n.procs[k].pid) for k in ("prefill", "decode")])
        for fds, kib in (zip(*(s[i] for s in seen)) for i in range(2)):
            assert fds[-1] == fds[0], fds
            if not sanitizer.KIND:  # a sanitizer keeps what is freed
                assert kib[-1] - kib[3] < 512, kib  # 340 requests; 52 KiB were seen
        c.close()
    finally:
        n.stop()


def prompt_logprobs(session, r):
    """{position: PromptLogprob}, checked for order and for coming before PrefillDone."""
    out = {}
    for m in list(session.got):
        if m.WhichOneof("m") == "prompt_logprobs" and m.prompt_logprobs.request == r:
            assert m.prompt_logprobs.first == len(out) + 1
            for t in m.prompt_logprobs.tokens:
                out[len(out) + 1] = t
        elif m.WhichOneof("m") == "prefill_done" and m.prefill_done.request == r:
            return out
    raise AssertionError("no PrefillDone")


@pytest.mark.parametrize("n", [1, 16, 50, 300])
def test_prompt_logprobs(c, n):
    """What generation says of its tokens is what a prompt of the same tokens gets."""
    ids = prompt(n, 600 + n)
    r = rid()
    text = c.both(c.d, r, ids, 20, logprobs=2)
    said = c.d.tokens(r)
    longer = ids + text[:-1]
    c.resident(longer, len(longer) // BLOCK)  # none of this is read
    for w, phases, max_new in ((c.p, c.pb.PREFILL, 0), (c.p, c.pb.PREFILL, 3), (c.d, c.pb.BOTH, 3)):
        r = rid()
        c.reserve(r, longer, wait=False)
        c.submit(w, r, longer, phases, max_new, prompt_logprobs=True, prompt_top=2, logprobs=-1)
        assert w.ended(r).status == OK
        c.release(r)
        got = prompt_logprobs(w, r)
        assert [t.token for t in got.values()] == longer[1:]
        done = w.find("prefill_done", r)[0]
        assert (done.cached_tokens, done.computed_tokens) == (0, len(longer))
        assert len(w.tokens(r)) == (max_new if phases == c.pb.BOTH else min(max_new, 1))
        for i, t in enumerate(said[:-1]):
            mine = got[n + i] if n + i else None
            limit = 0 if c.node.exact else 0.1
            assert mine.token == t.token and abs(mine.logprob - t.logprob) <= limit, (i, mine, t)
            assert len(mine.top) == 2
            if c.node.exact:
                assert [(x.id, x.logprob) for x in mine.top] == [(x.id, x.logprob) for x in t.top]


def test_cancel_before_the_reservation(c):
    r = rid()
    c.submit(c.p, r, prompt(30, 1), c.pb.PREFILL, 5)
    c.p.send(cancel=c.pb.Cancel(request=r, epoch=1))
    assert c.p.ended(r).status == OK
    r = rid()
    c.submit(c.d, r, prompt(30, 1), c.pb.DECODE, 5)
    e = c.d.ended(r)  # nobody reserves: the kvstore says so after two seconds
    assert e.status == -2 and "reserved" in e.detail, e


def test_a_deadline_ends_it(slow):
    c, ids, r = slow, prompt(40, 3), rid()
    c.reserve(r, ids, wait=False)
    c.submit(c.d, r, ids, c.pb.BOTH, 6000, left_ms=300)
    e = c.d.ended(r)
    assert e.status == -6 and "deadline" in e.detail and len(c.d.tokens(r)) < 6000, e
    c.release(r)


def test_epochs(slow):
    c, ids, r = slow, prompt(40, 2), rid()
    c.reserve(r, ids, epoch=5, wait=False)
    c.submit(c.d, r, ids, c.pb.BOTH, 6000, epoch=5)
    c.d.wait(lambda: c.d.tokens(r, 5), "a token")
    c.submit(c.d, r, ids, c.pb.BOTH, 8, epoch=5)
    assert c.d.ended(r, 5).status == EXISTS
    c.submit(c.d, r, ids, c.pb.BOTH, 8, epoch=4)
    assert c.d.ended(r, 4).status == STALE
    n = len(c.d.find("ended", r, 5))
    c.reserve(r, ids, epoch=6, wait=False)
    c.submit(c.d, r, ids, c.pb.BOTH, 8, epoch=6)  # ends what epoch 5 still runs
    c.d.wait(lambda: len(c.d.find("ended", r, 5)) > n, "end of epoch 5")
    assert len(c.result(r, 8, [c.d], 6)) == 8 and len(c.d.tokens(r, 5)) < 6000
    c.release(r, 6)


@pytest.mark.parametrize("what,bad", [
    ("vocabulary", dict(tokens=[5, 2048])), ("n_prompt", dict(n_prompt=99)), ("context", dict(tokens=[7] * 8193)),
    ("max_new", dict(max_new=0)), ("choices", dict(n=17)), ("prompt_top", dict(prompt_logprobs=True, prompt_top=21)),
    ("max_new", dict(max_new=0, prompt_logprobs=True)),
    ("temperature", dict(temperature=float("nan"))), ("stop_ids", dict(stop=[9999])),
    ("temperature", dict(temperature=10001)), ("repetition_penalty", dict(repetition_penalty=1001)),
    ("repetition_penalty", dict(repetition_penalty=-1)), ("presence_penalty", dict(frequency_penalty=-1001)),
    ("logprobs", dict(logprobs=21)), ("logprobs", dict(logprobs=-2)), ("epoch", dict(epoch=0)), ("top_p", dict(top_p=1.5)),
])
def test_bad_submissions_are_refused_with_a_reason(c, what, bad):
    r = rid()
    args = dict(tokens=[5, 6, 7], max_new=4, epoch=1)
    args.update(bad)
    epoch = args["epoch"]
    c.submit(c.d, r, args.pop("tokens"), c.pb.BOTH, **args)
    e = c.d.ended(r, epoch)
    assert e.status == INVALID and what in e.detail, e


def test_a_worker_accepts_what_its_engine_can_sample_with(c):
    how = dict(temperature=10000, repetition_penalty=1000, frequency_penalty=1000, presence_penalty=-1000)
    assert len(c.both(c.d, rid(), [5, 6, 7], 4, **how)) == 4


def test_a_broken_or_silent_session_frees_its_requests(slow):
    ids = prompt(60, 4)
    for silent in (False, True):
        other = Conductor(slow.node)
        r = rid()
        other.reserve(r, ids, wait=False)
        other.submit(other.d, r, ids, other.pb.BOTH, 5000)
        other.d.wait(lambda: other.d.tokens(r), "a token")
        if silent:
            other.d.silent = True
            other.d.wait(lambda: other.d.closed, "the worker ends the session")
        other.close()
        slow.idle()
        assert len(other.d.tokens(r)) < 5000


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


def resumed(node, kv):
    return node.metrics("decode")[f'baton_worker_resumed_tokens_total{{kv="{kv}"}}']


@pytest.mark.parametrize("engine", ["null", "cpu"])
def test_preempted_rows_come_back_from_the_pool(engine):
    """Pages for three of ten sequences: the same tokens as without pressure, and little is computed twice."""
    n, more = Node(engine, decode={"engine.pages": 28}), 200 if engine == "null" else 100
    try:
        if not n.exact:
            pytest.skip("on this processor rows depend on their neighbours' number")
        c = Conductor(n)
        jobs = [(rid(), prompt(30 + 5 * i, 700 + i)) for i in range(10)]
        alone = [c.both(c.p, rid(), ids, more, **SEEDED) for _, ids in jobs]
        n.pace(20)  # all are there before one is over
        for i, (r, ids) in enumerate(jobs):
            c.reserve(r, ids, wait=False)
            c.submit(c.d, r, ids, c.pb.DECODE if i % 2 else c.pb.BOTH, more, **SEEDED)
            if i % 2:
                c.submit(c.p, r, ids, c.pb.PREFILL, more, **SEEDED)
        c.d.wait(lambda: len(c.d.tokens(jobs[0][0])) >= 20, "tokens")
        n.pace(0)
        assert [c.result(r, more, [c.p, c.d] if i % 2 else [c.d]) for i, (r, _) in enumerate(jobs)] == alone
        preempted = n.metric("decode", "vllm:num_preemptions_total")
        assert preempted > 0
        assert resumed(n, "reloaded") > resumed(n, "recomputed"), n.metrics("decode")
        c.idle()
        r, ids = rid(), prompt(60, 799)  # choices, whose generated blocks differ
        alone = [c.both(c.p, rid(), ids, more, choice=k, **SEEDED) for k in range(10)]
        before = resumed(n, "reloaded")
        assert c.apart(r, ids, more, n=10, **SEEDED) == alone
        assert n.metric("decode", "vllm:num_preemptions_total") > preempted and resumed(n, "reloaded") > before
        c.idle()  # no lease is left
        c.close()
    finally:
        n.stop()


def test_tokens_of_steps_go_together(c):
    """Steps that end while a message is on its way share the next one: every token once, in order, in fewer messages."""
    if c.node.engine != "null":
        pytest.skip("needs steps that are shorter than a message's way")
    r, ids = rid(), prompt(30, 640)
    assert len(c.both(c.d, r, ids, 3000)) == 3000  # whole and in order, as it checks
    messages = [m.tokens for m in c.d.got if m.WhichOneof("m") == "tokens" and m.tokens.tokens[0].request == r]
    assert sum(len(m.tokens) for m in messages) == 3000 and len(messages) < 3000


def test_preempted_rows_go_on_without_the_kvstore():
    """Stopped, it answers nothing: rows that come back wait a moment for it and are computed again."""
    n = Node("null", decode={"engine.pages": 28})
    try:
        c = Conductor(n)
        jobs = [(rid(), prompt(30 + i, 800 + i)) for i in range(6)]
        alone = [c.both(c.p, rid(), ids, 220) for _, ids in jobs]
        n.pace(10)  # some seconds: they are met in the middle
        for r, ids in jobs:
            c.reserve(r, ids)
            c.submit(c.d, r, ids, c.pb.BOTH, 220)
        c.d.wait(lambda: all(c.d.tokens(r) for r, _ in jobs), "tokens")  # their grants are open
        n.procs["kvstore"].send_signal(signal.SIGSTOP)
        n.pace(0)
        try:
            for r, _ in jobs[:3]:
                assert c.d.ended(r).status == OK
        finally:
            n.procs["kvstore"].send_signal(signal.SIGCONT)
        for (r, _), want in zip(jobs, alone):
            assert c.d.ended(r).status == OK
            assert [t.token for t in c.d.tokens(r)] == want
        assert n.metric("decode", "vllm:num_preemptions_total") > 0 and resumed(n, "recomputed") > 0
        with open(f"{n.dir}/decode.log") as f:
            assert "ev=lease_unanswered" in f.read()
        c.kv.close()  # it may have taken its silence for ours; what it reserved for us goes with the session
        c.kv = n.connect("kvstore")
        c.idle()
        c.close()
    finally:
        n.stop()


def test_preemption_changes_no_token():
    """Seven sequences in a worker with pages for about three; nothing comes back from the pool."""
    n = Node("null", decode={"engine.pages": 24, "worker.writeback": "false"})
    try:
        c = Conductor(n)
        jobs = [(rid(), prompt(30 + i, 500 + i)) for i in range(7)]
        alone = [c.both(c.p, rid(), ids, 90) for _, ids in jobs]
        n.pace(50)  # all are there before one is over
        for r, ids in jobs:
            c.reserve(r, ids, wait=False)
            c.submit(c.d, r, ids, c.pb.BOTH, 90)
        c.d.wait(lambda: len(c.d.tokens(jobs[0][0])) >= 10, "tokens")
        n.pace(0)
        assert [c.result(r, 90, [c.d]) for r, _ in jobs] == alone
        assert n.metric("decode", "vllm:num_preemptions_total") > 0
        c.idle()
        before = n.metric("decode", "vllm:num_preemptions_total")
        alone = [c.both(c.p, rid(), jobs[3][1], 90, choice=k, **SEEDED) for k in range(12)]
        assert c.apart(rid(), jobs[3][1], 90, n=12, **SEEDED) == alone  # twelve choices, the same way
        assert c.both(c.d, rid(), jobs[3][1], 90, n=12, **SEEDED) == alone
        assert n.metric("decode", "vllm:num_preemptions_total") > before
        c.idle()
        r = rid()
        c.submit(c.d, r, prompt(300, 1), c.pb.BOTH, 100)
        e = c.d.ended(r)
        assert e.status == -9 and "engine.pages" in e.detail, e
        c.close()
    finally:
        n.stop()


def test_a_higher_class_goes_first():
    """Pages for little more than one of six sequences; who comes last is done before most if his class is higher.
    Those who made way get the same tokens."""
    n = Node("null", decode={"engine.pages": 28})
    try:
        c = Conductor(n)
        low = [(rid(), prompt(40 + i, 900 + i)) for i in range(6)]
        high, ids = rid(), prompt(200, 910)
        alone = [c.both(c.p, rid(), p, 220, **SEEDED) for _, p in low]
        want = c.both(c.p, rid(), ids, 12, **SEEDED)
        n.pace(10)
        for r, p in low:
            c.reserve(r, p)
            c.submit(c.d, r, p, c.pb.BOTH, 220, priority=1, **SEEDED)
        c.d.wait(lambda: c.d.tokens(low[0][0]), "tokens")
        c.reserve(high, ids)
        c.submit(c.d, high, ids, c.pb.BOTH, 12, priority=-7, **SEEDED)
        assert c.result(high, 12, [c.d]) == want
        assert sum(bool(c.d.find("ended", r)) for r, _ in low) < 4
        n.pace(0)
        assert [c.result(r, 220, [c.d]) for r, _ in low] == alone
        assert n.metric("decode", "vllm:num_preemptions_total") > 0
        c.idle()
        c.close()
    finally:
        n.stop()


def test_the_kvstore_goes_and_comes_back():
    n = Node("null")
    try:
        c = Conductor(n)
        ids = prompt(80, 6)
        want = c.both(c.d, rid(), ids, 300)
        n.pace(20)
        r, waiting = rid(), rid()
        c.reserve(r, ids, wait=False)
        c.submit(c.d, r, ids, c.pb.BOTH, 300)
        c.d.wait(lambda: len(c.d.tokens(r)) > 5, "tokens")
        opens = lambda: n.metric("kvstore", "baton_kvstore_opens")  # noqa: E731
        assert n._wait(lambda: opens() == 0, 60, "the prompt is whole, its grant closed")
        c.reserve(waiting, ids, wait=False)
        c.submit(c.d, waiting, ids, c.pb.DECODE, 300)  # never lands: nobody prefills
        assert n._wait(lambda: opens() == 1, 60, "this one is open")
        n.procs["kvstore"].kill()
        n.procs["kvstore"].wait()
        assert c.d.ended(waiting).status == PEER_LOST
        n.pace(0)
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


def test_sigterm_while_loading(tmp_path):
    """A big model's weights are being made: the worker goes at once, and nobody has heard of it."""
    config = json.load(open(os.path.join(MODEL, "config.json")))
    config.update(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
                  num_key_value_heads=8, head_dim=128)
    (tmp_path / "config.json").write_text(json.dumps(config))
    n = Node("null")
    try:
        n.procs["decode"].send_signal(signal.SIGTERM)
        assert n.procs["decode"].wait(60 * PATIENCE) == 0
        n.sets["decode"] = {"engine.device": "cpu", "model.path": tmp_path, "model.load_format": "dummy"}
        open(f"{n.dir}/decode.log", "w").close()
        n.start("decode")
        assert n._wait(lambda: "ev=loading" in n.log("decode"), 60, "loading"), n.log("decode")
        n.procs["decode"].send_signal(signal.SIGTERM)
        assert n.procs["decode"].wait(60 * PATIENCE) == 0
        assert "ev=engine " not in n.log("decode") and "while=loading" in n.log("decode"), n.log("decode")
        assert n.get("/baton/baton/members/decode/") == []
    finally:
        n.stop()


def test_a_second_sigterm_ends_at_once():
    n = Node("null")
    try:
        n.pace(20)  # the answers take two minutes
        c = Conductor(n)
        r, ids = rid(), prompt(40, 8)
        c.reserve(r, ids, wait=False)
        c.submit(c.d, r, ids, c.pb.BOTH, 6000, n=3, **SEEDED)
        c.d.wait(lambda: len(c.d.tokens(r)) > 3, "tokens")
        n.procs["decode"].send_signal(signal.SIGTERM)
        n.member("decode", state=2)
        n.procs["decode"].send_signal(signal.SIGTERM)
        e = c.d.ended(r)  # so that it is planned again elsewhere
        assert e.status == UNAVAILABLE and "stopping" in e.detail, e
        assert n.procs["decode"].wait(60 * PATIENCE) == 0 and len(c.d.tokens(r)) < 3 * 6000
        assert n.get("/baton/baton/members/decode/") == []
        c.close()
    finally:
        n.stop()


def test_sigterm_drains():
    n = Node("null")
    try:
        n.pace(50)
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
        n.pace(0)
        assert c.d.ended(r).status == OK
        assert len(c.d.tokens(r)) == 400
        assert n.procs["decode"].wait(60 * PATIENCE) == 0
        assert n.get("/baton/baton/members/decode/") == []
        c.close()
    finally:
        n.stop()

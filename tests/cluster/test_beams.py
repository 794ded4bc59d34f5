"""Beam search: the reference's answers, whichever workers compute them, whatever happens meanwhile; and best_of."""
import json
import os
import threading

import pytest

from conftest import scrape, wait_for
from restarts import SLOW_MS, Restarts
from sanitizer import PATIENCE
from test_faults import EXACT
from test_worker_runtime import prompt, rid
from worker_node import INVALID, ROOT, TOO_LARGE, Conductor, Node, pack

C, CHAT = "/v1/completions", "/v1/chat/completions"

GOLDEN = json.load(open(os.path.join(ROOT, "tests", "golden", "beams.json")))
EARLY = {False: 0, True: 1, "never": 2}
SPLIT = {"model.activations": "split"}  # more bits: fewer near ties


@pytest.fixture(scope="module")
def node():
    n = Node("cpu", kvstore=SPLIT, prefill=SPLIT, decode=dict(SPLIT, **{"engine.pages": 48, "engine.max_slots": 24}))
    yield n
    codes = n.stop()
    assert codes["prefill"] == 0 and codes["decode"] == 0, codes


@pytest.fixture
def c(node):
    con = Conductor(node)
    yield con
    try:
        con.idle()
    finally:
        con.close()


def submit(c, worker, r, g, phases, sampling=(), **more):
    s = dict(temperature=1, top_p=1, repetition_penalty=1, seed=1, logprobs=0, max_new=g["max_new"], stop_ids=g["stop_ids"],
             min_new=g["min_new"])
    s.update(sampling)
    m = dict(request=r, epoch=1, phases=phases, tokens=pack(g["prompt_ids"]), n_prompt=len(g["prompt_ids"]),
             sampling=c.pb.Sampling(**s), root_key=c.node.settings.root_key, n=g["beams"], beams=g["beams"],
             length_penalty=g["length_penalty"], early_stopping=EARLY[g["early_stopping"]])
    m.update(more)
    worker.send(submit=c.pb.Submit(**m))


def begin(c, g, apart, **more):
    r = rid()
    c.reserve(r, g["prompt_ids"], wait=False)
    if apart:
        submit(c, c.d, r, g, c.pb.DECODE, **more)
        submit(c, c.p, r, g, c.pb.PREFILL, **more)
    else:
        submit(c, c.d, r, g, c.pb.BOTH, **more)
    return r


def answers(c, r, g, apart, n=None):
    """Those of the search, checked against the reference."""
    out = c.choices(r, n or g["beams"], 0, [c.p, c.d] if apart else [c.d])
    assert out == [a["ids"] for a in g["answers"][:n or g["beams"]]], g
    if apart:
        assert c.p.tokens(r) == []
    for k, a in enumerate(g["answers"][:n or g["beams"]]):
        told = [t for t in c.d.tokens(r) if t.choice == k]
        assert [t.logprob for t in told] == pytest.approx(a["logprobs"], abs=0.03)
        assert told[-1].finish == (1 if a["ids"][-1] in g["stop_ids"] else 2)
    assert c.d.find("searching", r)
    return out


@pytest.mark.parametrize("apart", [False, True])
def test_answers_are_those_of_the_reference(c, node, apart):
    """All at once on so few pages that searches lose theirs, beside rows that draw their tokens."""
    assert {g["beams"] for g in GOLDEN} == set(range(2, 9)) and {g["early_stopping"] for g in GOLDEN} == {False, True, "never"}
    before = node.metric("decode", "vllm:num_preemptions_total")
    todo, rows = [], []
    node.pace(20)  # most are there before one is over
    for i, g in enumerate(GOLDEN):
        todo.append((begin(c, g, apart), g))
        if i % 12 == 0:
            rows.append((rid(), prompt(30, 70 + i)))
            c.reserve(*rows[-1], wait=False)
            c.submit(c.d, *rows[-1], c.pb.BOTH, 120)
    node.pace(0)
    for r, g in todo:
        answers(c, r, g, apart)
    beside = [c.result(r, 120, [c.d]) for r, _ in rows]
    assert node.metric("decode", "vllm:num_preemptions_total") > before
    if node.exact:
        assert beside == [c.both(c.p, rid(), ids, 120) for _, ids in rows]
    assert node.metric("decode", "baton_worker_beam_page_copies_total") > 100
    assert node.metric("decode", "vllm:spec_decode_num_draft_tokens_total") < 120 * len(rows)


def test_the_best_ones_and_what_else_was_likely(c):
    g = max(GOLDEN, key=lambda g: g["beams"])
    r = begin(c, g, False, n=2, sampling={"logprobs": 3})
    answers(c, r, g, False, n=2)
    for t in c.d.tokens(r):
        assert len(t.top) == 3 and t.top[0].logprob >= t.top[1].logprob >= t.top[2].logprob
        assert t.logprob <= t.top[0].logprob + 1e-6
        assert t.token not in [k.id for k in t.top] or t.logprob == [k.logprob for k in t.top if k.id == t.token][0]


def test_what_a_worker_refuses(c):
    g = GOLDEN[0]
    for says, status, sampling, more in [
            ("at most 16", INVALID, {}, {"beams": 17}), ("at most as many", INVALID, {}, {"beams": 2, "n": 3}),
            ("at most", INVALID, {}, {"beams": 2 ** 32 - 1}), ("use fewer", INVALID, {"stop_ids": [1, 2, 3, 4, 5]}, {"beams": 16}),
            ("length_penalty", INVALID, {}, {"length_penalty": float("nan")}),
            ("length_penalty", INVALID, {}, {"length_penalty": 10.5}), ("early_stopping", INVALID, {}, {"early_stopping": 3}),
            ("no grammar", INVALID, {}, {"grammar_kind": 3, "grammar": b"a"}),
            ("penalties", INVALID, {"repetition_penalty": 1.1}, {}), ("penalties", INVALID, {"presence_penalty": 1}, {}),
            ("bias", INVALID, {"bias_ids": [1], "bias": [1]}, {}), ("max_new", INVALID, {"max_new": 0}, {}),
            ("KV pages", TOO_LARGE, {"max_new": 400}, {"beams": 4, "n": 1})]:
        r = rid()
        c.reserve(r, g["prompt_ids"], wait=False)
        submit(c, c.d, r, g, c.pb.BOTH, sampling=sampling, **more)
        e = c.d.ended(r)
        assert e.status == status and says in e.detail, (more, e)
        c.release(r)
    answers(c, begin(c, g, False), g, False)


# ---- clusters ----

@pytest.fixture(scope="module")
def setting():
    """Prefill on n1, decode on n2 and n3."""
    r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2", "--set", "all.model.activations=split")
    yield r
    r.stop()


def body(g, **more):
    return dict({"prompt": g["prompt_ids"], "max_tokens": g["max_new"], "use_beam_search": True, "n": g["beams"],
                 "length_penalty": g["length_penalty"], "early_stopping": g["early_stopping"], "min_tokens": g["min_new"],
                 "stop_token_ids": g["stop_ids"][2:], "logprobs": 0, "return_tokens_as_token_ids": True}, **more)


def ids(choice):
    return [int(t.split(":")[1]) for t in choice["logprobs"]["tokens"]]


def check(c, out, g, n=None):
    n = n or g["beams"]
    assert [x["index"] for x in out["choices"]] == list(range(n))
    for x, a in zip(out["choices"], g["answers"]):
        assert ids(x) == a["ids"], g
        assert x["logprobs"]["token_logprobs"] == pytest.approx(a["logprobs"], abs=0.03)
        assert x["finish_reason"] == ("stop" if a["ids"][-1] in g["stop_ids"] else "length")
    assert out["usage"]["completion_tokens"] == sum(len(a["ids"]) for a in g["answers"][:n])


def test_the_api(setting):
    c = setting.c
    for g in GOLDEN[::9]:
        check(c, c.post(C, body(g)), g)
        check(c, c.post(C, body(g, n=1, best_of=g["beams"])), g, 1)
    # A stream brings the same at the end, choice by choice.
    g = GOLDEN[40]
    whole = c.post(C, body(g))
    got = {}
    for e in c.stream(C, body(g)):
        for x in e["choices"] if e != "[DONE]" else []:
            got[x["index"]] = got.get(x["index"], "") + x["text"]
    assert got == {x["index"]: x["text"] for x in whole["choices"]}
    # Beside other prompts, with the prompt and its logprobs, and in a chat.
    two = c.post(C, body(g, prompt=[g["prompt_ids"], GOLDEN[0]["prompt_ids"]], echo=True, logprobs=2))
    assert len(two["choices"]) == 2 * g["beams"]
    for x, a in zip(two["choices"], g["answers"]):
        assert ids(x) == g["prompt_ids"] + a["ids"]
    chat = {"messages": [{"role": "user", "content": "Where is he?"}], "max_tokens": 12, "use_beam_search": True, "n": 2,
            "temperature": 0, "logprobs": True}
    a, b = c.post(CHAT, chat)["choices"]
    assert a["message"]["content"] != b["message"]["content"]
    mean = [sum(t["logprob"] for t in x["logprobs"]["content"]) / len(x["logprobs"]["content"]) for x in (a, b)]
    assert mean[0] >= mean[1]
    assert c.post(CHAT, chat)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert c.post(CHAT, chat)["choices"][0]["message"] == a["message"]


def test_best_of(setting):
    c = setting.c
    req = {"prompt": "ROMEO:\n", "max_tokens": 20, "temperature": 1, "seed": 7, "logprobs": 0, "ignore_eos": False}
    all_of_them = c.post(C, dict(req, n=6))["choices"]
    mean = lambda x: sum(x["logprobs"]["token_logprobs"]) / len(x["logprobs"]["token_logprobs"])
    best = sorted(all_of_them, key=mean, reverse=True)
    out = c.post(C, dict(req, n=2, best_of=6))
    assert [x["text"] for x in out["choices"]] == [x["text"] for x in best[:2]]
    assert out["usage"]["completion_tokens"] == sum(len(x["logprobs"]["tokens"]) for x in all_of_them)
    out = c.post(C, dict(req, best_of=6, logprobs=None))
    assert out["choices"][0]["text"] == best[0]["text"] and out["choices"][0]["logprobs"] is None
    status, _, text = c.request("POST", C, dict(req, best_of=3, stream=True))
    assert status == 400 and json.loads(text)["error"]["param"] == "best_of"


def of(member, name):
    return sum(v for k, v in scrape(member["http"]).items() if k.split("{")[0] == name)


def test_a_killed_worker_costs_time_only(setting):
    """The search begins again on the other decode worker, and its client sees nothing of it."""
    c = setting.c
    req = {"prompt": "JULIET:\nO", "max_tokens": 150, "use_beam_search": True, "n": 6, "ignore_eos": True, "logprobs": 0}
    want = c.post(C, req)
    assert all(len(x["logprobs"]["tokens"]) == 150 for x in want["choices"])
    before = setting.total("baton_requests_replanned_total")
    got = []
    t = threading.Thread(target=lambda: got.append(c.post(C, req)))
    workers = setting.members("decode")
    steps = {m["name"]: of(m, "baton_worker_steps_total") for m in workers}
    c.pace(SLOW_MS)
    t.start()
    busy = wait_for(lambda: [m for m in workers if of(m, "baton_worker_steps_total") > steps[m["name"]] + 10], 30,
                    "the search runs", every_s=0.01)[0]
    setting.kill_member(busy)
    c.pace(0)
    t.join(120 * PATIENCE)
    assert got and got[0]["usage"]["completion_tokens"] == 900
    if EXACT:
        assert got[0]["choices"] == want["choices"]
    assert setting.total("baton_requests_replanned_total") > before

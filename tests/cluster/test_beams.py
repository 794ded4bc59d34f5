"""Beam search: the reference's answers, whichever workers compute them, whatever happens meanwhile; and best_of."""
import json
import os

import pytest

from test_worker_runtime import prompt, rid
from worker_node import INVALID, ROOT, Conductor, Node, pack

GOLDEN = json.load(open(os.path.join(ROOT, "tests", "golden", "beams.json")))
EARLY = {False: 0, True: 1, "never": 2}
SPLIT = {"model.activations": "split"}  # more bits: fewer near ties


@pytest.fixture(scope="module")
def node():
    n = Node("cpu", kvstore=SPLIT, prefill=SPLIT, decode=SPLIT)
    yield n
    codes = n.stop()
    assert codes["prefill"] == 0 and codes["decode"] == 0, codes


@pytest.fixture
def c(node):
    con = Conductor(node)
    yield con
    con.idle()
    con.close()


def submit(c, worker, r, g, phases, n=None, **more):
    s = dict(temperature=1, top_p=1, repetition_penalty=1, seed=1, logprobs=0, max_new=g["max_new"], stop_ids=g["stop_ids"],
             min_new=g["min_new"])
    s.update({k: v for k, v in more.items() if k in s or k in ("bias", "bias_ids", "presence_penalty")})
    top = {k: v for k, v in more.items() if k not in s}
    m = dict(request=r, epoch=1, phases=phases, tokens=pack(g["prompt_ids"]), n_prompt=len(g["prompt_ids"]),
             sampling=c.pb.Sampling(**s), root_key=c.node.settings.root_key, n=n or g["beams"], beams=g["beams"],
             length_penalty=g["length_penalty"], early_stopping=EARLY[g["early_stopping"]])
    m.update(top)
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
def test_answers_are_those_of_the_reference(c, apart):
    assert {g["beams"] for g in GOLDEN} == set(range(2, 9)) and {g["early_stopping"] for g in GOLDEN} == {False, True, "never"}
    todo = [(begin(c, g, apart), g) for g in GOLDEN]
    for r, g in todo:
        answers(c, r, g, apart)

"""Drafts of the model's own MTP layer (worker.speculate: mtp) change no answer, on the way of its KV through hand-off, prefix
cache, preemption and a killed worker; and they are the same drafts wherever a row runs."""
import json
import os
import shutil

import pytest

from conftest import ROOT, scrape
from restarts import Restarts
from test_faults import EXACT, run_streams
from test_speculation import answer, drafts, same

TOKENS = 200
GOLDEN = os.path.join(ROOT, "tests", "golden")
pytestmark = pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The small checkpoint with a tokenizer; the MTP layer is right about half of the time."""
    path = shutil.copytree(os.path.join(GOLDEN, "models", "tiny-mtp"), tmp_path_factory.mktemp("models") / "tiny-mtp")
    shutil.copy(os.path.join(GOLDEN, "tokenizers", "deepseek", "tokenizer.json"), path)
    return str(path)


def options(model, *more):
    # A step of this model takes so little that measured costs are noise: few rows at once, one thread.
    return ["--model", model, "--set", "all.model.mtp=true", "--set", "decode.worker.speculate=mtp",
            "--set", "decode.engine.threads=1", *more]


def prompt_of(seed, n=150):
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 690 for i in range(n)]


def bodies(n=TOKENS):
    base = {"max_tokens": n, "ignore_eos": True, "logprobs": 3, "seed": 5, "temperature": 0}
    return [dict(base, prompt=prompt_of(1)), dict(base, prompt=prompt_of(2), temperature=0.8),
            dict(base, prompt=prompt_of(1), temperature=0.9, n=3), dict(base, prompt=prompt_of(1)[:90] + prompt_of(3)[:70]),
            dict(base, prompt=prompt_of(4), temperature=0.7, presence_penalty=0.5, repetition_penalty=1.1),
            dict(base, prompt=prompt_of(5), temperature=0.6, stop_token_ids=[9, 30], min_tokens=40),
            {**base, "ignore_eos": False, "prompt": prompt_of(6), "temperature": 0.8, "guided_regex": "[a-z ]{40,200}"}]


def off(body):
    return dict(body, speculation="off")


def test_answers_are_the_same_through_hand_off_and_cache(make_cluster, model):
    c = make_cluster(*options(model, "--nodes", "2", "--prefill", "1", "--decode", "1"))
    for body in bodies():
        want = answer(c, off(body))
        before = drafts(c.metrics("decode"))
        for kind in "mtp", "auto", "suffix":  # the prompt is cached now
            assert answer(c, dict(body, speculation=kind)) == want, (kind, body)
        print(body.get("n", 1), drafts(c.metrics("decode")) - before)
    m = c.metrics("decode")
    tried, right = drafts(m), drafts(m, "accepted_tokens")
    print(f"{right:.0f} of {tried:.0f} accepted")
    assert tried > 100 and 0.15 * tried < right < tried
    beams = {"prompt": prompt_of(1), "max_tokens": 20, "use_beam_search": True, "n": 3, "temperature": 0}
    assert len(c.post("/v1/completions", beams)["choices"]) == 3
    mono = make_cluster(*options(model, "--nodes", "1", "--prefill", "0", "--decode", "1"))
    for body in bodies()[:3]:
        assert answer(mono, body) == answer(c, off(body))
    # Without the layer, too.
    plain = make_cluster("--model", model, "--nodes", "1", "--prefill", "0", "--decode", "1", "--set", "decode.engine.threads=1")
    for body in bodies()[:3]:
        assert answer(plain, off(body)) == answer(c, body)
    status, _, text = c.request("POST", "/v1/completions", {"prompt": "a", "speculation": "medusa"})
    assert status == 400 and "mtp" in json.loads(text)["error"]["message"]


def test_preempted_rows(make_cluster, model):
    c = make_cluster(*options(model, "--nodes", "2", "--prefill", "1", "--decode", "1", "--set", "decode.engine.pages=80",
                              "--set", "all.kv.block_tokens=16"))
    many = [dict(b, n=1) for b in bodies(300)]
    want = run_streams((c.host, c.port), [off(b) for b in many])
    same(run_streams((c.host, c.port), [dict(b, speculation="mtp") for b in many], slow=c), want)
    m = c.metrics("decode")
    assert sum(v for k, v in m.items() if k.startswith("vllm:num_preemptions_total")) > 0 and drafts(m, "accepted_tokens") > 0


def test_a_killed_worker(model):
    r = Restarts(*options(model, "--nodes", "3", "--prefill", "1", "--decode", "2"))
    try:
        plain = [off(dict(b, prompt=prompt_of(20 + i))) for i, b in enumerate(bodies() * 2)]
        want = run_streams((r.c.host, r.c.port), plain)
        victim = {}

        def kill():
            victim.update(r.kill_busiest("decode"))
        same(run_streams((r.c.host, r.c.port), [dict(b, speculation="mtp") for b in plain], kill, when=10, slow=r.c), want)
        assert r.total("baton_requests_replanned_total") > 0
        left, = (m for m in r.members("decode") if m["pid"] != victim["pid"])
        assert drafts(scrape(left["http"])) > 0
    finally:
        r.stop()


def test_refused(make_cluster, model):
    with pytest.raises(RuntimeError, match="needs model.mtp: true"):
        make_cluster("--model", model, "--nodes", "1", "--prefill", "0", "--decode", "1", "--set", "decode.worker.speculate=mtp")
    with pytest.raises(RuntimeError, match="num_nextn_predict_layers names no MTP layer"):
        make_cluster("--nodes", "1", "--prefill", "0", "--decode", "1", "--set", "all.model.mtp=true")

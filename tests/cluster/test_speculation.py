"""Drafts change the speed of an answer and never its tokens: answers with and without them are compared, of the CPU engine
(bit for bit, logprobs included) and of the null engine whose answers are edited copies of the prompt, so that nearly all
drafts are right. Through disaggregation, prefix cache, preemption and a killed decode worker."""
import json
import os
import shutil

import pytest

from conftest import ROOT, scrape, wait_for
from restarts import Restarts
from test_faults import EXACT, run_streams

TOKENS = 100
NAME = "vllm:spec_decode_num_"


def drafts(metrics, what="draft_tokens"):
    return sum(v for k, v in metrics.items() if k.startswith(NAME + what + "_total"))


def answer(c, body):
    out = c.post("/v1/completions", body)
    return [[x["text"], x["finish_reason"], x["logprobs"]] for x in out["choices"]], out["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def prompt():
    with open(os.path.join(ROOT, "deploy", "local", "demo-prompt.txt")) as f:
        return f.read()[:1500]


# ---- the CPU engine ----

def bodies(c, prompt):
    """A bias on few tokens makes texts in which much occurs again; the draws among them are the model's."""
    ids = c.post("/tokenize", {"prompt": " the king and my love, o", "add_special_tokens": False})["tokens"][:5]
    base = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 5, "seed": 11,
            "logit_bias": {str(i): 30 for i in ids}}
    return [
        dict(base, temperature=0), dict(base, temperature=0.7), dict(base, temperature=1.0, n=4),
        dict(base, temperature=0.8, presence_penalty=0.6, frequency_penalty=0.02, repetition_penalty=1.05),
        dict(base, temperature=0, frequency_penalty=0.3),
        dict(base, temperature=1.0, stop_token_ids=[ids[0]], min_tokens=40),
        dict(base, temperature=0.7, top_k=4, top_p=0.9, min_p=0.01),
        dict(base, temperature=0.7, stop=[" love, love", "my the my"]),
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 5, "temperature": 0},
    ]


@pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")
def test_answers_are_the_same(make_cluster, prompt):
    c = make_cluster("--nodes", "2", "--prefill", "1", "--decode", "1", "--set", "decode.engine.threads=1")
    for body in bodies(c, prompt):
        want, n = answer(c, dict(body, speculation="off"))
        for kind in ("auto", "suffix", "ngram"):  # the prompt is cached now
            before = drafts(c.metrics("decode"))
            assert answer(c, dict(body, speculation=kind)) == (want, n), (kind, body)
            print(kind, n, drafts(c.metrics("decode")) - before)
    m = c.metrics("decode")
    assert drafts(m) > 40 and 0 < drafts(m, "accepted_tokens") < drafts(m)
    at = {k: v for k, v in m.items() if k.startswith(NAME + "accepted_tokens_per_pos_total")}
    assert sum(at.values()) == drafts(m, "accepted_tokens")
    # A request may have none, and the operator decides for all.
    before = drafts(m)
    answer(c, dict(bodies(c, prompt)[1], speculation="off"))
    assert drafts(c.metrics("decode")) == before
    status, _, text = c.request("POST", "/v1/completions", {"prompt": "a", "speculation": "medusa"})
    assert status == 400 and "auto, off, suffix, ngram, draft" in json.loads(text)["error"]["message"]


@pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")
@pytest.mark.parametrize("model", ["shakespeare-draft-1m", "shakespeare-llama-6m"])
def test_a_draft_model(make_cluster, prompt, model):
    """A small one, and the model itself, whose drafts are all right: also the sampled ones."""
    c = make_cluster("--nodes", "2", "--prefill", "1", "--decode", "1", "--set", "decode.engine.threads=1", "--set",
                     "decode.worker.speculate=" + os.path.join(ROOT, "deploy", "models", model))
    for body in bodies(c, prompt):
        want = answer(c, dict(body, speculation="off"))
        for kind in ("draft", "auto", "suffix"):
            assert answer(c, dict(body, speculation=kind)) == want, (kind, body)
    m = c.metrics("decode")
    print(drafts(m), drafts(m, "accepted_tokens"))
    assert drafts(m) > 40
    before = drafts(m), drafts(m, "accepted_tokens")
    at = c.host, c.port
    many = [dict(b, n=1, speculation="draft") for b in bodies(c, prompt)]
    want = run_streams(at, [dict(b, speculation="off") for b in many])
    same(run_streams(at, many), want)  # rows beside each other, of different ages
    m = c.metrics("decode")
    if model == "shakespeare-llama-6m":
        assert drafts(m, "accepted_tokens") - before[1] == drafts(m) - before[0]


@pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")
def test_a_killed_worker_with_a_draft_model(prompt):
    """Its successor's draft model computes the tokens anew, and drafts for rows in the middle: nothing changes."""
    r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2", "--set", "decode.engine.threads=1", "--set",
                 "decode.worker.speculate=" + os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m"))
    try:
        at = r.c.host, r.c.port
        plain = [dict(b, speculation="off", max_tokens=2 * TOKENS) for b in bodies(r.c, prompt)]
        plain += [{"prompt": prompt, "max_tokens": 2 * TOKENS, "temperature": 0.9, "seed": 5, "logprobs": 1, "speculation": "off",
                   "guided_regex": "([a-z]{2,9}[ ,] ?){150}"}]
        want = run_streams(at, plain)
        victim = {}

        def kill():
            victim.update(r.kill_busiest("decode"))
        same(run_streams(at, [dict(b, speculation="draft") for b in plain], kill, when=20, slow=r.c), want)
        assert r.total("baton_requests_replanned_total") > 0
        left, = (m for m in r.members("decode") if m["pid"] != victim["pid"])
        assert drafts(scrape(left["http"])) > 0
    finally:
        r.stop()


def test_a_draft_model_of_other_tokens(make_cluster, tmp_path):
    model = shutil.copytree(os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m"), tmp_path / "draft")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["the"], vocab["king"] = vocab.get("king", 300), vocab.get("the", 301)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RuntimeError, match="their tokenizers have different tokens"):
        make_cluster("--nodes", "1", "--prefill", "0", "--decode", "1", "--set",
                     f"decode.worker.speculate={model}")


# ---- the null engine: a step costs 2 ms, a token of it nearly nothing ----

EDIT = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.9, "logprobs": 0}
NULL = "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null", "--set", "decode.engine.calibrate_ms=1s"


def edited(c, prompt):
    ids = c.post("/tokenize", {"prompt": prompt})["tokens"][:400]
    return [dict(EDIT, prompt=ids[i:], seed=i, n=1 + i % 3, speculation="off") for i in range(6)]


@pytest.fixture
def null_engine(monkeypatch):
    monkeypatch.setenv("BATON_NULL_PACE", "2000,10")
    monkeypatch.setenv("BATON_NULL_EDIT", "12")


def same(got, want):
    for g, w in zip(got, want):
        assert g.error is None and g.done, (g.body, g.error)
        assert g.seen() == w.seen(), g.body


def on_drafts(bodies):
    return [dict(b, speculation="auto") for b in bodies]


def decode_metrics(r):
    return [scrape(m["http"]) for m in r.members("decode")]


def test_edited_text_needs_few_steps_and_survives_a_kill(null_engine, prompt):
    r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2", *NULL)
    try:
        at, plain = (r.c.host, r.c.port), edited(r.c, prompt)
        want = run_streams(at, plain, slow=r.c)
        assert all(len(w.lps[0]) == EDIT["max_tokens"] for w in want)
        assert want[1].text[0] != want[1].text[1]  # choices are edited otherwise
        steps = sum(m["baton_worker_steps_total"] for m in decode_metrics(r))
        same(run_streams(at, on_drafts(plain), slow=r.c), want)
        m = decode_metrics(r)
        fast = sum(x["baton_worker_steps_total"] for x in m) - steps
        drafted, accepted = sum(map(drafts, m)), sum(drafts(x, "accepted_tokens") for x in m)
        print(f"steps {steps:.0f} without drafts, {fast:.0f} with them; {accepted:.0f} of {drafted:.0f} accepted")
        assert fast < steps / 2 and accepted > 0.25 * drafted  # long drafts go beyond the next edit
        # A worker that is killed takes what it had accepted with it: other workers find the same drafts again.
        same(run_streams(at, on_drafts(plain), lambda: r.kill_busiest("decode"), when=100, slow=r.c), want)
        assert r.total("baton_requests_replanned_total") > 0
    finally:
        r.stop()


def test_preempted_rows_have_the_same_tokens(null_engine, make_cluster, prompt):
    """Rows lose their pages and load them again: a block in the pool has the KV of accepted tokens only."""
    c = make_cluster("--nodes", "2", "--prefill", "1", "--decode", "1", *NULL, "--set", "decode.engine.pages=180")
    at, plain = (c.host, c.port), edited(c, prompt)
    want = run_streams(at, [dict(b, n=1) for b in plain])  # few pages: the same, as they say without drafts
    got = run_streams(at, [dict(b, n=1) for b in on_drafts(plain)], slow=c)
    same(got, want)
    m = c.metrics("decode")
    name = [k for k in m if k.startswith("vllm:num_preemptions_total")][0]
    assert m[name] > 0 and drafts(m, "accepted_tokens") > 500
    reloaded = [v for k, v in m.items() if k.startswith("baton_worker_resumed_tokens_total") and "reloaded" in k]
    assert sum(reloaded) > 0
    # The next turn begins with an answer that was written back block by block.
    ids = plain[0]["prompt"]
    said = c.post("/v1/completions", dict(plain[0], n=1, speculation="auto", return_tokens_as_token_ids=True))
    told = [int(t.split(":")[1]) for t in said["choices"][0]["logprobs"]["tokens"]]
    turn = dict(plain[0], prompt=ids + told, max_tokens=50, n=1)

    def cached():
        out = c.post("/v1/completions", turn)
        return out["usage"]["prompt_tokens_details"]["cached_tokens"] > len(ids) + 400 and out

    out = wait_for(cached, 20, "the answer is in the cache")
    again = c.post("/v1/completions", dict(turn, cache_salt="another"))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert out["choices"][0]["text"] == again["choices"][0]["text"]


def test_the_operator_decides(null_engine, make_cluster, prompt):
    c = make_cluster("--nodes", "1", "--prefill", "0", "--decode", "1", *NULL, "--set", "decode.worker.speculate=off")
    body = dict(edited(c, prompt)[0], n=1, speculation="suffix", max_tokens=50)
    assert answer(c, body)[1] == 50
    assert drafts(c.metrics("decode")) == 0


@pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")
def test_a_prediction_changes_the_speed_only(make_cluster):
    """OpenAI's predicted outputs: an answer that is known beforehand needs fewer steps, one that is not stays as it is."""
    c = make_cluster("--nodes", "2", "--prefill", "1", "--decode", "1", "--set", "decode.engine.threads=1")
    base = {"messages": [{"role": "user", "content": "Speak, good my lord."}], "max_tokens": 120, "ignore_eos": True,
            "temperature": 0.7, "seed": 4, "logprobs": True, "top_logprobs": 3}

    def ask(**more):
        before = c.metrics("decode")
        out = c.post("/v1/chat/completions", dict(base, **more))
        after = c.metrics("decode")
        steps = after["baton_worker_steps_total"] - before["baton_worker_steps_total"]
        return [[x["message"], x["finish_reason"], x["logprobs"]] for x in out["choices"]], out["usage"], steps

    want, usage, steps = ask()
    assert "completion_tokens_details" not in usage
    text = want[0][0]["content"]
    said = {"type": "content", "content": text}
    got, usage, fewer = ask(prediction=said)
    details = usage["completion_tokens_details"]
    assert got == want and fewer < steps * 0.7, (fewer, steps)
    count = len(c.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])
    assert details["accepted_prediction_tokens"] > 0.8 * 120
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == count
    # in parts, and edited: some is left out, some is put in
    parts = {"type": "content", "content": [{"type": "text", "text": text[:100]}, {"type": "text", "text": "QQ ZZ " + text[160:]}]}
    got, usage, _ = ask(prediction=parts)
    assert got == want and 30 < usage["completion_tokens_details"]["accepted_prediction_tokens"] < 120
    # another text, no speculation, two choices
    got, usage, _ = ask(prediction={"type": "content", "content": "0123456789" * 50})
    assert got == want and usage["completion_tokens_details"]["accepted_prediction_tokens"] < 5
    assert ask(prediction=said, speculation="off")[0] == want
    two = ask(n=2)[0]
    assert ask(n=2, prediction=said)[0] == two
    events = [e for e in c.stream("/v1/chat/completions", dict(base, prediction=said, stream_options={"include_usage": True}))]
    assert events[-2]["usage"]["completion_tokens_details"] == details
    for bad in ("text", {"type": "content"}, {"type": "content", "content": [1]}, {"type": "x", "content": ""}):
        status, _, body = c.request("POST", "/v1/chat/completions", dict(base, prediction=bad))
        assert status == 400 and b'"param":"prediction"' in body, body

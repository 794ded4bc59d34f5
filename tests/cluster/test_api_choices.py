"""Several choices in one answer on a running cluster: n, arrays of prompts, echo and prompt
logprobs. What a choice says must be what it says alone."""
import json
import math
import threading

import pytest

from conftest import scrape, wait_for

PROMPTS = ["ROMEO:\n", "JULIET:\n", "First Citizen:\nBefore we"]


def texts(out):
    return [c["text"] for c in out["choices"]]


def ids_of(cluster, text):
    return cluster.post("/tokenize", {"prompt": text})["tokens"]


def test_arrays_of_prompts_are_what_each_is_alone(cluster):
    alone = [cluster.complete(p, 12, ignore_eos=True) for p in PROMPTS]
    for prompts in (PROMPTS, [ids_of(cluster, p) for p in PROMPTS]):
        out = cluster.complete(prompts, 12, ignore_eos=True)
        assert [c["index"] for c in out["choices"]] == [0, 1, 2]
        assert texts(out) == [a["choices"][0]["text"] for a in alone]
        u = out["usage"]
        assert u["completion_tokens"] == 36
        assert u["prompt_tokens"] == sum(a["usage"]["prompt_tokens"] for a in alone)
        assert u["total_tokens"] == u["prompt_tokens"] + 36


def test_arrays_streamed(cluster):
    want = texts(cluster.complete(PROMPTS, 12, ignore_eos=True))
    got, ends = [""] * 3, [None] * 3
    events = list(cluster.stream("/v1/completions", {
        "prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True}}))
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"]["completion_tokens"] == 36
    for e in events:
        (c,) = e["choices"]
        assert ends[c["index"]] is None
        got[c["index"]] += c["text"]
        ends[c["index"]] = c["finish_reason"]
    assert got == want and ends == ["length"] * 3


def test_n_with_a_seed(cluster):
    body = {"prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0.9, "seed": 7, "n": 4,
            "ignore_eos": True}
    out = cluster.post("/v1/completions", body)
    assert [c["index"] for c in out["choices"]] == [0, 1, 2, 3]
    assert len(set(texts(out))) > 1  # choices differ from each other
    assert texts(cluster.post("/v1/completions", body)) == texts(out)
    # the first is the choice that comes alone
    assert texts(cluster.post("/v1/completions", dict(body, n=1)))[0] == texts(out)[0]
    assert out["usage"]["completion_tokens"] == 64
    assert out["usage"]["prompt_tokens"] == 3  # one prompt, one prefill
    streamed = [""] * 4
    for e in cluster.stream("/v1/completions", body):
        if e != "[DONE]":
            streamed[e["choices"][0]["index"]] += e["choices"][0]["text"]
    assert streamed == texts(out)


def test_a_stop_string_ends_one_choice_at_its_worker(make_cluster, monkeypatch):
    """The choices that have met their stop string are not generated on behind it, on an engine that is slow enough to be told."""
    monkeypatch.setenv("BATON_NULL_PACE", "5000,0")
    cluster = make_cluster("--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")

    def generated():
        return sum(v for d in cluster.status() if d["daemon"] in ("prefill", "decode")
                   for k, v in scrape(d["http"]).items() if k.startswith("baton_worker_generation_tokens_total"))
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0.9, "seed": 7, "n": 4,
            "ignore_eos": True}
    free = texts(cluster.post("/v1/completions", body))
    # What all but one say soon: a stretch of each choice's text that the last one never says.
    stops = [next(t[i:i + 6] for i in range(20, 200) if t[i:i + 6] not in free[3]) for t in free[:3]]
    before = generated()
    out = cluster.post("/v1/completions", dict(body, stop=stops))
    assert [c["finish_reason"] for c in out["choices"]] == ["stop"] * 3 + ["length"]
    assert texts(out)[3] == free[3]
    assert all(f.startswith(t) for t, f in zip(texts(out), free))
    used = out["usage"]["completion_tokens"]
    assert used < 1000
    wait_for(lambda: generated() - before >= used - 1, 60, "the workers' counters")
    # Told late they would go on for a while; not told at all, to 1,600.
    assert generated() - before < (used + 1600) / 2, (generated() - before, used)


def test_n_of_several_prompts(cluster):
    out = cluster.complete(PROMPTS[:2], 8, n=3, ignore_eos=True)  # greedy: all alike
    assert [c["index"] for c in out["choices"]] == list(range(6))
    got = texts(out)
    assert got[0] == got[1] == got[2] and got[3] == got[4] == got[5] and got[0] != got[3]


def test_n_in_chat(cluster):
    body = {"messages": [{"role": "user", "content": "Speak."}], "n": 2, "max_tokens": 8,
            "temperature": 0.8, "seed": 3}
    out = cluster.post("/v1/chat/completions", body)
    assert [c["index"] for c in out["choices"]] == [0, 1]
    assert all(c["message"]["role"] == "assistant" for c in out["choices"])


def test_echo(cluster):
    plain = cluster.complete(PROMPTS[0], 8, ignore_eos=True)["choices"][0]["text"]
    for prompt in (PROMPTS[0], ids_of(cluster, PROMPTS[0])):
        out = cluster.complete(prompt, 8, echo=True, ignore_eos=True)
        assert out["choices"][0]["text"] == PROMPTS[0] + plain
        assert out["usage"]["completion_tokens"] == 8
    out = cluster.complete(PROMPTS[0], 0, echo=True)
    assert out["choices"][0]["text"] == PROMPTS[0]
    assert out["usage"]["completion_tokens"] == 0
    assert out["choices"][0]["finish_reason"] == "length"


def test_echo_with_logprobs(cluster):
    """The prompt's logprobs are those the model gives the same tokens when it generates them."""
    text = PROMPTS[2] * 8
    made = cluster.complete(text, 6, logprobs=2, ignore_eos=True)["choices"][0]
    whole = cluster.complete(text + made["text"], 0, echo=True, logprobs=2)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    lp = whole["choices"][0]["logprobs"]
    n = whole["usage"]["prompt_tokens"]
    assert all(len(lp[k]) == n for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None
    assert all(v <= 0 and math.isfinite(v) for v in lp["token_logprobs"][1:])
    got = whole["choices"][0]["text"]
    assert got == text + made["text"]
    for tok, at in list(zip(lp["tokens"], lp["text_offset"]))[1:]:
        assert got[at:at + len(tok)] == tok
    tail = lp["token_logprobs"][-6:]
    if lp["tokens"][-6:] == made["logprobs"]["tokens"]:  # it may be cut into other tokens
        assert tail == pytest.approx(made["logprobs"]["token_logprobs"], abs=0.05)
    # computed without reading the cache, though by now it is there
    again = cluster.complete(text + made["text"], 2, echo=True, logprobs=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    lp2 = again["choices"][0]["logprobs"]
    assert lp2["token_logprobs"][1:n] == pytest.approx(lp["token_logprobs"][1:], abs=0.05)
    assert len(lp2["tokens"]) == n + again["usage"]["completion_tokens"]


def test_prompt_logprobs(cluster):
    ids = ids_of(cluster, PROMPTS[2])
    for path, body in (("/v1/completions", {"prompt": ids}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]})):
        out = cluster.post(path, dict(body, prompt_logprobs=3, max_tokens=1))
        rows = out["choices"][0]["prompt_logprobs"] if "prompt" in body else out["prompt_logprobs"]
        assert len(rows) == out["usage"]["prompt_tokens"] and rows[0] is None
        for i, row in enumerate(rows[1:], 1):
            assert 3 <= len(row) <= 4
            if "prompt" in body:
                assert str(ids[i]) in row
            ranks = sorted(v["rank"] for v in row.values())
            assert ranks[:3] == [1, 2, 3] and all(r > 3 for r in ranks[3:])
            assert list(ranks) == [v["rank"] for v in sorted(row.values(), key=lambda v: -v["logprob"])]
            assert all(v["logprob"] <= 0 and isinstance(v["decoded_token"], str)
                       for v in row.values())


def test_one_bad_prompt_refuses_all(cluster):
    """And none of the others is computed."""
    before = cluster.metrics("conductor")
    status, headers, body = cluster.request("POST", "/v1/completions",
                                            {"prompt": ["ok", [1] * 9000], "stream": True})
    assert status == 400 and headers["content-type"].startswith("application/json"), (status, body)
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and "9000" in error["message"], error
    after = cluster.metrics("conductor")
    planned = [k for k in after if k.startswith(("baton_plan_total", "vllm:prompt_tokens_total"))]
    assert planned and [after[k] for k in planned] == [before[k] for k in planned]
    assert cluster.complete("ok", 1)["usage"]["completion_tokens"] == 1


def test_leaving_ends_all_of_them(cluster):
    c = cluster.connect()
    body = ('{"prompt":["a","b","c","d"],"n":2,"max_tokens":4000,"ignore_eos":true,"stream":true}')
    c.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    r = c.getresponse()
    assert r.status == 200 and r.read(64)
    c.sock.close()
    r.close()
    c.close()
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 60,
             "the generation is gone")

    def running():
        m = cluster.metrics("conductor")
        return [v for k, v in m.items() if k.startswith("vllm:num_requests_running")]

    wait_for(lambda: running() and not any(running()), 60, "no request runs any more")


def test_many_prompts_at_once(cluster):
    """64 prompts in one request beside others' streams."""
    prompts = [f"Speech {i}:\n" for i in range(64)]
    other = []

    def stream():
        for e in cluster.stream("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 40,
                                                    "temperature": 0, "ignore_eos": True}):
            other.append(e)

    t = threading.Thread(target=stream)
    t.start()
    out = cluster.complete(prompts, 4, ignore_eos=True)
    assert len(out["choices"]) == 64 and out["usage"]["completion_tokens"] == 256
    t.join(60)
    assert other[-1] == "[DONE]" and len(other) == 41

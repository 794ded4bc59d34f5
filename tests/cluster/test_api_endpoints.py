"""The API of a running cluster: every endpoint, the recorded vectors of tokenizer and chat template,
logprobs in both formats, stop strings, usage."""
import http.client
import json
import os
import re
import subprocess
import time

import pytest

from conftest import BUILD, LOCAL, golden, wait_for

PROMPT = "ROMEO:\n"


def test_models_health_version_metrics(cluster):
    models = cluster.get("/v1/models")
    assert models["object"] == "list" and len(models["data"]) == 1
    m = models["data"][0]
    assert m["id"] == os.path.basename(m["root"].rstrip("/"))
    assert m["object"] == "model" and m["max_model_len"] == 8192
    assert abs(m["created"] - time.time()) < 7 * 86400
    assert cluster.get("/v1/models/" + m["id"])["id"] == m["id"]
    status, headers, body = cluster.request("GET", "/health")
    assert status == 200 and body == b"ok"
    assert cluster.get("/version")["version"]
    status, headers, body = cluster.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4"
    assert b"# TYPE baton_http_responses_total counter" in body
    for path in ("/health", "/v1/models", "/metrics"):
        status, headers, body = cluster.request("HEAD", path)
        assert status == 200 and body == b"" and int(headers["content-length"]) > 0


@pytest.mark.parametrize("i", range(len(golden("tokenizer.json"))))
def test_tokenizer_vectors(cluster, i):
    v = golden("tokenizer.json")[i]
    out = cluster.post("/tokenize", {"prompt": v["text"]})
    assert out["tokens"] == v["ids"]
    assert out["count"] == len(v["ids"]) and out["max_model_len"] == 8192
    out = cluster.post("/tokenize", {"prompt": v["text"], "add_special_tokens": False})
    assert out["tokens"] == v["ids_no_special"]
    out = cluster.post("/detokenize", {"tokens": v["ids_no_special"]})
    assert out["prompt"] == v["decoded"]


def test_detokenize_keeps_special_tokens(cluster):
    ids = cluster.post("/tokenize", {"prompt": "O"})["tokens"]
    assert cluster.post("/detokenize", {"tokens": ids})["prompt"] == "<|begin_of_text|>O"
    assert cluster.post("/detokenize", {"tokens": []})["prompt"] == ""


@pytest.mark.parametrize("i", range(len(golden("chat.json"))))
def test_chat_template_vectors(cluster, i):
    v = golden("chat.json")[i]
    out = cluster.post("/tokenize", {"messages": v["messages"], "add_generation_prompt": True})
    assert cluster.post("/detokenize", {"tokens": out["tokens"]})["prompt"] == v["text"]
    assert cluster.post("/tokenize", {"messages": v["messages"]})["tokens"] == out["tokens"]
    less = cluster.post("/tokenize", {"messages": v["messages"], "add_generation_prompt": False})
    assert less["count"] < out["count"]
    # the very same prompt goes to the model
    chat = cluster.post("/v1/chat/completions", {"messages": v["messages"], "max_tokens": 1})
    assert chat["usage"]["prompt_tokens"] == out["count"]


def test_prompt_of_text_and_of_ids_are_the_same(cluster):
    ids = cluster.post("/tokenize", {"prompt": PROMPT})["tokens"]
    outs = [cluster.complete(p, 24)["choices"] for p in (PROMPT, ids, [PROMPT])]
    assert outs[0] == outs[1] == outs[2]
    ref = next(r for r in golden("shakespeare-llama-6m.json") if r["prompt"] == PROMPT)
    assert ids == ref["prompt_ids"]


def test_completion_shape(cluster):
    out = cluster.post("/v1/completions", {"model": cluster.model, "prompt": PROMPT})
    assert out["id"].startswith("cmpl-") and out["object"] == "text_completion"
    assert out["model"] == cluster.model and abs(out["created"] - time.time()) < 60
    (c,) = out["choices"]
    assert c["index"] == 0 and c["logprobs"] is None
    assert c["finish_reason"] in ("length", "stop")
    u = out["usage"]
    assert u["prompt_tokens"] == 3 and 1 <= u["completion_tokens"] <= 16  # the default
    assert u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"]
    assert u["prompt_tokens_details"]["cached_tokens"] == 0  # less than a block
    assert "timings" not in out


def test_chat_shape(cluster):
    out = cluster.post("/v1/chat/completions",
                       {"messages": [{"role": "user", "content": [{"type": "text", "text": "Speak."}],
                                      "name": None}],
                        "max_completion_tokens": 12, "temperature": 0})
    assert out["id"].startswith("chatcmpl-") and out["object"] == "chat.completion"
    (c,) = out["choices"]
    assert c["message"]["role"] == "assistant" and isinstance(c["message"]["content"], str)
    assert out["usage"]["completion_tokens"] <= 12
    same = cluster.post("/v1/chat/completions",
                        {"messages": [{"role": "user", "content": "Speak."}], "max_tokens": 12,
                         "temperature": 0})
    assert same["choices"] == out["choices"]


def test_lengths_and_eos(cluster):
    out = cluster.complete(PROMPT, 40, ignore_eos=True)
    assert out["usage"]["completion_tokens"] == 40
    assert out["choices"][0]["finish_reason"] == "length"
    assert cluster.complete(PROMPT, 1)["usage"]["completion_tokens"] == 1
    out = cluster.complete(PROMPT, 30, min_tokens=30)
    assert out["usage"]["completion_tokens"] == 30


def test_stop_strings(cluster):
    whole = cluster.complete(PROMPT, 48, ignore_eos=True)["choices"][0]["text"]
    stop = "ROMEO"
    at = whole.index(stop)
    for s in (stop, ["nowhere to be found", stop], [whole[at - 2:at + 3], stop]):
        out = cluster.complete(PROMPT, 48, stop=s)
        c = out["choices"][0]
        want = whole[:at - 2] if isinstance(s, list) and s[0] in whole else whole[:at]
        assert c["text"] == want and c["finish_reason"] == "stop"
        assert c["stop_reason"] in (s if isinstance(s, list) else [s])
        assert out["usage"]["completion_tokens"] < 48  # what came beyond is not billed
    out = cluster.complete(PROMPT, 48, stop=stop, include_stop_str_in_output=True)
    assert out["choices"][0]["text"] == whole[:at + len(stop)]
    # streamed: not a byte of the stop string leaks
    text = "".join(e["choices"][0]["text"] for e in cluster.stream(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "stop": stop})
        if e != "[DONE]")
    assert text == whole[:at]


def test_seeded_sampling_repeats(cluster):
    def run(seed):
        return cluster.complete(PROMPT, 24, temperature=1.0, seed=seed)["choices"]

    assert run(5) == run(5)
    assert len({json.dumps(run(s)) for s in range(6)}) > 1
    unseeded = {json.dumps(cluster.complete(PROMPT, 24, temperature=1.0)["choices"])
                for _ in range(4)}
    assert len(unseeded) > 1


def test_completion_logprobs(cluster):
    out = cluster.complete(PROMPT, 8, logprobs=3, ignore_eos=True)
    lp = out["choices"][0]["logprobs"]
    assert all(len(lp[k]) == 8 for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    text = out["choices"][0]["text"]
    assert "".join(lp["tokens"]) == text
    for tok, offset in zip(lp["tokens"], lp["text_offset"]):
        assert text[offset:offset + len(tok)] == tok
    for tok, value, top in zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"]):
        assert value <= 0 and len(top) == 3 and top[tok] == value == max(top.values())
    for n in (0, 20):
        lp = cluster.complete(PROMPT, 2, logprobs=n)["choices"][0]["logprobs"]
        assert [len(t) for t in lp["top_logprobs"]] == [max(n, 1)] * 2
    ids = cluster.complete(PROMPT, 4, logprobs=2, return_tokens_as_token_ids=True)
    lp = ids["choices"][0]["logprobs"]
    assert all(t.startswith("token_id:") for t in lp["tokens"] + list(lp["top_logprobs"][0]))
    # streamed: the same values, spread over the events
    events = [e for e in cluster.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 8,
                                                            "temperature": 0, "logprobs": 3,
                                                            "ignore_eos": True}) if e != "[DONE]"]
    joined = {k: sum((e["choices"][0]["logprobs"][k] for e in events
                      if e["choices"][0]["logprobs"]), []) for k in lp}
    assert joined == out["choices"][0]["logprobs"]


def test_chat_logprobs(cluster):
    body = {"messages": [{"role": "user", "content": "Speak."}], "max_tokens": 6, "temperature": 0,
            "logprobs": True, "top_logprobs": 4}
    c = cluster.post("/v1/chat/completions", body)["choices"][0]
    content = c["logprobs"]["content"]
    assert len(content) <= 6
    for t in content:
        assert t["logprob"] <= 0 and len(t["top_logprobs"]) == 4
        assert bytes(t["bytes"]).decode(errors="replace") == t["token"] or \
            t["token"].startswith("bytes:")
        assert t["top_logprobs"][0]["logprob"] == t["logprob"]  # greedy
        assert t["top_logprobs"][0]["token"] == t["token"]
    body.pop("top_logprobs")
    c = cluster.post("/v1/chat/completions", body)["choices"][0]
    assert [t["top_logprobs"] for t in c["logprobs"]["content"]] == [[]] * len(content)
    assert [t["token"] for t in c["logprobs"]["content"]] == [t["token"] for t in content]


def test_logit_bias(cluster):
    ids = cluster.post("/tokenize", {"prompt": "I", "add_special_tokens": False})["tokens"]
    plain = cluster.complete(PROMPT, 4, logprobs=0, return_tokens_as_token_ids=True)
    first = plain["choices"][0]["logprobs"]["tokens"][0]
    banned = first.split(":")[1]
    out = cluster.complete(PROMPT, 4, logprobs=0, return_tokens_as_token_ids=True,
                           logit_bias={banned: -100})
    assert first not in out["choices"][0]["logprobs"]["tokens"]
    out = cluster.complete(PROMPT, 4, logit_bias={str(ids[0]): 100})
    assert out["choices"][0]["text"] == "IIII"


def test_usage_tells_the_cache_and_salts_part_it(cluster):
    prompt = f"Enter a messenger, {time.time()}. " * 8

    def cached(**more):
        return cluster.complete(prompt, 2, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]

    n = cluster.post("/tokenize", {"prompt": prompt})["count"]
    assert cached() < 16
    wait_for(lambda: cached() == (n - 1) // 16 * 16, 60, "the conductor knows the blocks")  # a kvstore tells it after the request
    assert cached(cache_salt="a") == 0
    wait_for(lambda: cached(cache_salt="a") == (n - 1) // 16 * 16, 60, "it knows those of salt a")
    assert cached(cache_salt="b") == 0


def test_timings_and_request_id(cluster):
    body = {"prompt": PROMPT, "max_tokens": 4}
    headers = {"x-baton-timings": "1", "x-request-id": "my-id_1.2:3"}
    status, h, data = cluster.request("POST", "/v1/completions", body, headers)
    assert status == 200 and h["x-request-id"] == "my-id_1.2:3"
    t = json.loads(data)["timings"]
    for key in ("prompt_tokens", "completion_tokens", "cached_tokens", "ttft_ms", "queue_ms",
                "prefill_ms", "decode_ms", "kv_bytes", "kv_segments", "hidden_fraction", "replans",
                "prefill", "decode"):
        assert key in t, key
    assert t["ttft_ms"] > 0 and t["replans"] == 0 and t["prefill"] and t["decode"]
    last = list(cluster.stream("/v1/completions", body, headers))[-2]
    assert last["choices"] == [] and last["timings"]["completion_tokens"] == 4
    assert "usage" not in last  # not asked for


def plan_header(text):
    return dict(x.strip().split("=", 1) for x in text.split(";"))


def test_plan_on_request(cluster):
    body = {"prompt": f"{PROMPT} {time.time()}", "max_tokens": 24, "ignore_eos": True}
    status, h, data = cluster.request("POST", "/v1/completions", body, {"x-baton-plan": "1"})
    assert status == 200
    head, p = plan_header(h["x-baton-plan"]), json.loads(data)["plan"]
    assert head["prefill"] == p["prefill"] and head["decode"] == p["decode"] and p["reason"]
    assert float(head["ttft_ms"]) == pytest.approx(p["predicted"]["ttft_ms"], abs=0.01)
    for key in ("ttft_ms", "tbt_ms", "queue_ms", "prefill_ms", "cached_tokens"):
        assert p["predicted"][key] >= 0 and p["actual"][key] >= 0, (key, p)
    assert p["actual"]["ttft_ms"] > p["actual"]["prefill_ms"] > 0 and p["actual"]["tbt_ms"] > 0
    assert head["id"] == json.loads(data)["id"] and p["again"] is None
    assert p["served_by"] == {"prefill": p["prefill"], "decode": p["decode"]}
    status, h, data = cluster.request("POST", "/v1/completions", dict(body, prompt=[PROMPT, "x"]), {"x-baton-plan": "1"})
    assert status == 200 and plan_header(h["x-baton-plan"])["id"] == json.loads(data)["id"] + "-0"

    def again():
        return list(cluster.stream("/v1/completions", body, {"x-baton-plan": "1"}))[-2]
    assert again()["choices"] == []
    wait_for(lambda: again()["plan"]["actual"]["cached_tokens"] > 0, 60, "the prompt's blocks are known")
    status, h, data = cluster.request("POST", "/v1/completions", body)
    assert "x-baton-plan" not in h and "plan" not in json.loads(data)
    text = cluster.request("GET", "/metrics")[2].decode()
    assert 'baton_plan_error_ratio_count{of="ttft"}' in text


def test_objectives_of_a_request(cluster):
    body = {"prompt": PROMPT, "max_tokens": 2}
    for name in ("x-slo-ttft-ms", "x-slo-tbt-ms"):
        for bad in ("", "0", "-1", "abc", "1e9", "nan", "86400001", "5 ms", "0x10"):
            status, _, data = cluster.request("POST", "/v1/completions", body, {name: bad})
            assert status == 400 and name in json.loads(data)["error"]["message"], (name, bad, data)
        assert cluster.request("POST", "/v1/completions", body, {name: "60000"})[0] == 200
        # Nobody can meet it, and nobody else is there who would miss his: it is served late.
        assert cluster.request("POST", "/v1/completions", body, {name: "0.001"})[0] == 200
    status, _, data = cluster.request("POST", "/v1/completions", body, {"x-baton-plan": "yes"})
    assert status == 400 and "x-baton-plan" in json.loads(data)["error"]["message"]


def test_bodies_of_the_load_generators(cluster):
    """What vllm bench, sglang bench, guidellm and aiperf send (unit/test_front_fields.c has more)."""
    ids = cluster.post("/tokenize", {"prompt": PROMPT})["tokens"]
    msg = [{"role": "user", "content": [{"type": "text", "text": "Speak."}]}]
    a = cluster.post("/v1/completions", {
        "model": cluster.model, "prompt": ids, "repetition_penalty": 1.0, "max_tokens": 4,
        "logprobs": None, "temperature": 0.0, "ignore_eos": True},
        headers={"x-request-id": "bench-0", "Authorization": "Bearer whatever"})
    b = cluster.post("/v1/completions", {
        "model": cluster.model, "prompt": PROMPT, "best_of": 1, "max_tokens": 4, "temperature": 0,
        "ignore_eos": True, "use_beam_search": False})
    c = cluster.post("/v1/chat/completions", {
        "model": cluster.model, "messages": msg, "max_completion_tokens": 4, "stop": None,
        "ignore_eos": True, "stream_options": None, "user": "u", "metadata": {}, "store": False,
        "service_tier": "auto", "parallel_tool_calls": True, "n": 1, "tools": None})
    assert a["choices"][0]["text"] == b["choices"][0]["text"]  # as ids and as text: the same prompt
    assert [x["usage"]["completion_tokens"] for x in (a, b, c)] == [4, 4, 4]


def test_a_refusal_shows_by_how_much(make_cluster, monkeypatch):
    """While a late request has the one place of late ones, who cannot be in time is refused. Not 'predicted 1 ms, objective 1 ms';
    and an objective below a millisecond is not one of a millisecond. The late one takes a minute, and leaves then."""
    monkeypatch.setenv("BATON_NULL_PACE", "15000,0")
    cluster = make_cluster("--set", "conductor.max_running=2", "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")
    late = cluster.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}, {"x-slo-ttft-ms": "0.005"})
    next(late)
    running = 'vllm:num_requests_running{model_name="%s"}' % cluster.model
    wait_for(lambda: cluster.metrics("conductor")[running] == 1, 60, "the late one runs")
    for name in ("x-slo-ttft-ms", "x-slo-tbt-ms"):
        status, _, body = cluster.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, {name: "0.005"})
        said = re.search(r"predicted ([0-9.]+) ms, objective ([0-9.]+) ms", json.loads(body)["error"]["message"])
        assert status == 429 and said[2] == "0.005" and float(said[1]) > 0.005, body
        # Admission asks for a share of the objective between tokens: a prediction below it is refused with that reason.
        step = float(said[1])
        for near in (1.02, 1.04, 1.1) if name == "x-slo-tbt-ms" else ():
            status, _, body = cluster.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, {name: f"{near * step:.3f}"})
            m = re.search(r"predicted ([0-9.]+) ms( and longer when more requests join)?, objective ([0-9.]+)", body.decode())
            assert m is None or (float(m[1]) <= float(m[3])) == bool(m[2]), body
    assert cluster.metrics("conductor")[running] >= 1, "the late one had its place all the time"
    late.close()


def test_api_keys(tmp_path):
    """With a keys file every route but the probes asks for a key; caches of keys are kept apart."""
    keys = tmp_path / "keys"
    keys.write_text("# the team's\nsk-one\nsk-two\n")
    keys.chmod(0o600)
    state = str(tmp_path / "state")
    env = dict(os.environ, BATON_BIN=os.path.join(BUILD, "bin"))
    p = subprocess.run([LOCAL, "up", "--dir", state, "--port", "0", "--set",
                        f"conductor.conductor.api_keys_file={keys}"], env=env, timeout=240,
                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert p.returncode == 0, p.stderr.decode()
        at = p.stdout.decode().split()[-1][len("http://"):]

        def ask(method, path, key=None, body=None):
            c = http.client.HTTPConnection(at, timeout=60)
            headers = {"Content-Type": "application/json"}
            if key:
                headers["Authorization"] = "Bearer " + key
            c.request(method, path, json.dumps(body) if body else None, headers)
            r = c.getresponse()
            data = r.read()
            c.close()
            return r.status, data

        for path in ("/health", "/version"):
            assert ask("GET", path)[0] == 200
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"),
                             ("POST", "/v1/chat/completions"), ("POST", "/tokenize"),
                             ("POST", "/detokenize"), ("GET", "/v1/nothing")):
            for key in (None, "sk-onex", "sk-", "# the team's"):
                status, data = ask(method, path, key, {"prompt": "a"} if method == "POST" else None)
                assert status == 401, (path, key)
                assert json.loads(data)["error"]["code"] == "invalid_api_key"
        assert ask("GET", "/v1/models", "sk-two")[0] == 200
        body = {"prompt": "My kingdom for a horse! " * 12, "max_tokens": 2}

        def cached(key):
            status, data = ask("POST", "/v1/completions", key, body)
            assert status == 200, data
            return json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("sk-one") == 0
        wait_for(lambda: cached("sk-one") > 0, 60, "the prompt's blocks are known")
        assert cached("sk-two") == 0
        logs = "".join(open(os.path.join(state, "logs", f), errors="replace").read()
                       for f in os.listdir(os.path.join(state, "logs")))
        assert "sk-one" not in logs and "kingdom" not in logs  # neither keys nor prompts
    finally:
        subprocess.run([LOCAL, "down", "--dir", state], timeout=60, check=True)

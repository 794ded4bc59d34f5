"""The stream format, byte by byte as load generators read it."""
import json
import re
import time

import pytest

CHAT = {"messages": [{"role": "user", "content": "Speak, good sir."}]}
TEXT = {"prompt": "ROMEO:\n"}
KINDS = [("/v1/completions", TEXT, "text_completion", "cmpl-"),
         ("/v1/chat/completions", CHAT, "chat.completion.chunk", "chatcmpl-")]


def raw(cluster, path, body):
    status, headers, data = cluster.request("POST", path, dict(body, stream=True))
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream")
    return data.decode()


def text_of(path, events):
    if path.endswith("chat/completions"):
        return "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
    return "".join(e["choices"][0]["text"] for e in events if e["choices"])


@pytest.mark.parametrize("path,body,obj,prefix", KINDS)
def test_format(cluster, path, body, obj, prefix):
    body = dict(body, max_tokens=12, temperature=0, ignore_eos=True)
    data = raw(cluster, path, body)
    assert re.fullmatch(r"(data: [^\n]+\n\n)+", data)
    parts = data.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    events = [json.loads(p[len("data: "):]) for p in parts[:-2]]
    assert len(events) == 12  # one event a token, the last with its finish_reason
    for e in events:
        assert e["object"] == obj and e["model"] == cluster.model
        assert e["id"] == events[0]["id"] and e["id"].startswith(prefix)
        assert abs(e["created"] - time.time()) < 60 and e["created"] == events[0]["created"]
        assert len(e["choices"]) == 1 and e["choices"][0]["index"] == 0
        assert "usage" not in e  # never unless asked for
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 11 + ["length"]
    if obj == "chat.completion.chunk":
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "content" in events[0]["choices"][0]["delta"]  # no event with only a role
        assert all("role" not in e["choices"][0]["delta"] for e in events[1:])
    whole = cluster.post(path, body)["choices"][0]
    want = whole["text"] if "text" in whole else whole["message"]["content"]
    assert text_of(path, events) == want


@pytest.mark.parametrize("path,body,obj,prefix", KINDS)
def test_usage_only_in_an_event_without_choices(cluster, path, body, obj, prefix):
    body = dict(body, max_tokens=5, ignore_eos=True, stream_options={"include_usage": True})
    events = list(cluster.stream(path, body))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == [] and last["object"] == obj
    u = last["usage"]
    assert u["completion_tokens"] == 5 and u["total_tokens"] == u["prompt_tokens"] + 5
    assert isinstance(u["prompt_tokens_details"]["cached_tokens"], int)
    assert all(e["usage"] is None and e["choices"] for e in events)


def test_continuous_usage(cluster):
    body = dict(TEXT, max_tokens=5, ignore_eos=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True})
    events = [e for e in cluster.stream("/v1/completions", body) if e != "[DONE]"]
    counts = [e["usage"]["completion_tokens"] for e in events if e["choices"]]
    assert counts == [1, 2, 3, 4, 5]
    assert all(e["usage"]["prompt_tokens"] == 3 for e in events)


def test_tokens_arrive_one_by_one(cluster):
    """The stream is a stream: its first events are there while the request runs, which would take many seconds more."""
    events = cluster.stream("/v1/completions", dict(TEXT, max_tokens=7000, n=8, temperature=1.0, ignore_eos=True))
    for _ in range(20):
        assert len(next(events)["choices"]) == 1
    running = sum(v for k, v in cluster.metrics("conductor").items() if k.startswith("vllm:num_requests_running"))
    events.close()  # the client leaves, so the request ends
    assert running >= 1
    assert sum(e != "[DONE]" for e in cluster.stream("/v1/completions", dict(TEXT, max_tokens=400, ignore_eos=True))) == 400


def test_streams_do_not_mix(cluster):
    """32 at once, each gets its own text to the end."""
    import threading
    prompts = [f"{name}:\n" for name in ("ROMEO", "JULIET", "HAMLET", "KING LEAR")]
    want = {p: cluster.complete(p, 40, ignore_eos=True)["choices"][0]["text"] for p in prompts}
    got, errors = [], []

    def run(p):
        try:
            events = [e for e in cluster.stream("/v1/completions",
                                                {"prompt": p, "max_tokens": 40, "temperature": 0,
                                                 "ignore_eos": True})]
            assert events[-1] == "[DONE]"
            got.append((p, text_of("/v1/completions", events[:-1])))
        except Exception as e:  # noqa: BLE001
            errors.append(e)

    threads = [threading.Thread(target=run, args=(prompts[i % 4],)) for i in range(32)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors and len(got) == 32
    if "avx512_bf16" in open("/proc/cpuinfo").read():
        for p, text in got:
            assert text == want[p]


def test_no_half_character_ever(cluster):
    """Every event is valid UTF-8 by itself, whatever the sampled bytes are."""
    body = {"prompt": "é☃😀", "max_tokens": 200, "temperature": 5.0, "seed": 3, "ignore_eos": True}
    data = raw(cluster, "/v1/completions", body)  # decode() is strict
    events = [json.loads(p[6:]) for p in data.split("\n\n")[:-2]]
    whole = cluster.post("/v1/completions", body)["choices"][0]["text"]
    assert text_of("/v1/completions", events) == whole


def test_errors_before_the_stream_have_a_status(cluster):
    status, headers, data = cluster.request("POST", "/v1/completions",
                                            {"prompt": "a", "max_tokens": 0, "stream": True})
    assert status == 400 and headers["content-type"] == "application/json"
    assert json.loads(data)["error"]["param"] == "max_tokens"

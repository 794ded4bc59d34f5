"""Streams of /v1/messages and /v1/responses as they go over the wire: the order of their events, a worker killed in the
middle, clients that leave."""
import json
import os
import re
import signal

import pytest

from conftest import wait_for
from restarts import SLOW_MS

TURNS = [{"role": "user", "content": "Speak, good sir."}]
BODIES = {"/v1/messages": {"messages": TURNS, "max_tokens": 24},
          "/v1/responses": {"input": TURNS, "max_output_tokens": 24}}
FIXED = {"temperature": 0, "ignore_eos": True}


class Stream:
    def __init__(self, cluster, path, **more):
        self.c = cluster.connect()
        body = dict(BODIES[path], **FIXED, **more, stream=True)
        self.c.request("POST", path, json.dumps(body),
                       {**cluster.headers, "Content-Type": "application/json", "x-baton-plan": "1"})
        self.r = self.c.getresponse()
        assert self.r.status == 200, self.r.read()

    def events(self):
        """(name, data) of each event; the name is the data's type."""
        buf = b""
        while True:
            while b"\n\n" in buf:
                event, buf = buf.split(b"\n\n", 1)
                name, data = re.fullmatch(rb"event: (.+)\ndata: (.+)", event).groups()
                data = json.loads(data)
                assert data["type"] == name.decode()
                yield name.decode(), data
            piece = self.r.read1(65536)
            if not piece:
                break
            buf += piece
        assert buf == b""
        self.c.close()

    def decode(self):
        """The worker that the plan names."""
        return re.search(r"decode=([^;]+)", self.r.getheader("x-baton-plan")).group(1)


def text_of(path, name, data):
    if path == "/v1/messages":
        return data["delta"]["text"] if name == "content_block_delta" else ""
    return data["delta"] if name == "response.output_text.delta" else ""


def chat_text(cluster, tokens):
    out = cluster.post("/v1/chat/completions", dict(FIXED, messages=TURNS, max_tokens=tokens))
    return out["choices"][0]["message"]["content"]


def order(events):
    """The names of the events, without repetitions in a row."""
    names = [n for n, _ in events]
    return [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]


def test_messages(cluster):
    events = list(Stream(cluster, "/v1/messages").events())
    assert order(events) == ["message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop",
                             "message_delta", "message_stop"]
    assert "".join(text_of("/v1/messages", n, d) for n, d in events) == chat_text(cluster, 24)
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 24
    start, end = events[0][1]["message"]["usage"], events[-2][1]["usage"]
    assert {**start, "output_tokens": 24} == end  # what was cached is known when the first token is


def test_responses(cluster):
    events = list(Stream(cluster, "/v1/responses").events())
    assert order(events) == ["response.created", "response.in_progress", "response.output_item.added",
                             "response.content_part.added", "response.output_text.delta", "response.output_text.done",
                             "response.content_part.done", "response.output_item.done", "response.incomplete"]
    assert [d["sequence_number"] for _, d in events] == list(range(len(events)))
    text = "".join(text_of("/v1/responses", n, d) for n, d in events)
    assert text == chat_text(cluster, 24)
    last = events[-1][1]["response"]
    assert last.pop("plan")["served_by"]["decode"]
    assert last["output"][0]["content"][0]["text"] == text
    assert last["usage"]["output_tokens"] == 24
    whole = cluster.post("/v1/responses", dict(BODIES["/v1/responses"], **FIXED))
    for r in (whole, last):
        r["output"][0].pop("id")
        for k in ("id", "created_at"):
            r.pop(k)
        r["usage"].pop("input_tokens_details")  # the second one found the prompt in the cache
    assert whole == last


@pytest.mark.parametrize("path", BODIES)
def test_client_leaves(cluster, path):
    gone = "baton_http_disconnects_total"
    before = cluster.metrics("conductor")[gone]
    limit = {"max_tokens": 3000} if path == "/v1/messages" else {"max_output_tokens": 3000}
    cluster.pace(SLOW_MS)
    try:
        s = Stream(cluster, path, **limit)
        n = 0
        for name, data in s.events():
            n += text_of(path, name, data) != ""
            if n == 5:
                break
        s.r.close()
        s.c.close()
        wait_for(lambda: cluster.metrics("conductor")[gone] == before + 1, 30, "it is noticed")
    finally:
        cluster.pace(0)
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 30, "and ended")


def test_killed_worker(make_cluster):
    """In the middle of each stream its decode worker is killed: no event differs from those of an undisturbed run."""
    c = make_cluster("--nodes", "1", "--prefill", "0", "--decode", "3")
    tokens = 200
    expected = chat_text(c, tokens)
    for path, limit in (("/v1/messages", "max_tokens"), ("/v1/responses", "max_output_tokens")):
        c.pace(SLOW_MS)  # generation goes on for long after the kill
        s, text, names, victim = Stream(c, path, **{limit: tokens}), "", [], None
        for name, data in s.events():
            text += text_of(path, name, data)
            names.append((name, data))
            if victim is None and len(text) > 40:
                victim = next(d for d in c.status() if s.decode() in os.path.basename(d["log"]))
                os.kill(victim["pid"], signal.SIGKILL)
                c.pace(0)
        assert victim is not None and text == expected
        assert order(names)[-1] in ("message_stop", "response.incomplete")
    assert c.metrics("conductor")["baton_requests_replanned_total"] >= 2

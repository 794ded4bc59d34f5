"""baton-bench serve: what it measures against servers whose times are known, what it says about failures, and
the cluster itself."""
import csv
import json
import os
import re
import socket
import subprocess
import threading
import time

import pytest

from conftest import ROOT

BENCH = os.path.join(ROOT, "tests", "bench", "baton-bench")


def bench(*args, timeout=120):
    p = subprocess.run([BENCH, "serve", *[str(a) for a in args]], stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


def values(out):
    rows = [li.split(",") for li in out.splitlines() if li.startswith("bench,")]
    assert rows and all(len(r) == 6 for r in rows), out
    return {r[1]: float(r[2]) for r in rows}


class Server:
    """Speaks just enough HTTP; answer(connection, body) does the rest."""

    def __init__(self, answer):
        self.answer, self.bodies = answer, []
        self.s = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.s.getsockname()[1]}/v1"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                c, _ = self.s.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(c,), daemon=True).start()

    def serve(self, c):
        with c, c.makefile("rb") as f:
            line = f.readline()
            size = 0
            while (h := f.readline().strip()):
                if h.lower().startswith(b"content-length:"):
                    size = int(h.split(b":")[1])
            body = f.read(size)
            if b"/v1/models" in line:
                text = b'{"data": [{"id": "m"}]}'
                c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                return
            self.bodies.append(json.loads(body))
            try:
                self.answer(c, self.bodies[-1])
            except OSError:
                pass


def chunk(c, event):
    text = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
    c.sendall(b"%x\r\n%s\r\n" % (len(text), text))


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


def steady(c, body):
    """First token after 150 ms, then one every 20 ms but for one gap of 100 ms."""
    n = body["max_tokens"]
    c.sendall(HEAD)
    chunk(c, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    time.sleep(0.15)
    for i in range(n):
        if i:
            time.sleep(0.1 if i == 5 else 0.02)
        chunk(c, {"choices": [{"delta": {"content": "x"}}]})
    words = len(body["messages"][0]["content"].split())
    chunk(c, {"choices": [], "usage": {"prompt_tokens": 2 * words + 7, "completion_tokens": n}})
    chunk(c, b"[DONE]")
    c.sendall(b"0\r\n\r\n")


def test_known_times_are_measured(tmp_path):
    s = Server(steady)
    rc, out, err = bench("--url", s.url, "--concurrency", 4, "--requests", 8, "--input", 101, "--output", 11,
                         "--chat", "--csv", tmp_path / "o.csv", "--ttft", 1000, "--tbt", 1)
    assert rc == 0, out + err
    v = values(out)
    # The server's sleeps bound from below; from above one figure bounds the other.
    assert 150 <= v["serve_ttft_p50"] <= v["serve_e2e_p50"] - 250
    assert 20 <= v["serve_gap_p50"] <= v["serve_tbt_p50"] and v["serve_tbt_p50"] >= 100
    assert 430 <= v["serve_e2e_p50"] < 10000
    assert v["serve_goodput"] == 0  # no request has a TBT of 1 ms
    with open(tmp_path / "o.csv") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == 8 and all(r["tokens"] == "11" and not r["error"] for r in rows)
    # Two tokens a word and seven more: the prompts were made to fit.
    assert all(abs(int(r["prompt_tokens"]) - 101) <= 3 for r in rows), rows[0]
    prompts = [b["messages"][0]["content"] for b in s.bodies]
    assert len(set(prompts)) == len(prompts)


def test_the_same_seed_asks_the_same():
    a, b = Server(steady), Server(steady)
    for s in (a, b):
        assert bench("--url", s.url, "--rate", 50, "--requests", 3, "--input", 50, "--output", 1, "--chat",
                     "--seed", 9)[0] == 0
    assert sorted(map(json.dumps, a.bodies)) == sorted(map(json.dumps, b.bodies))


def after(n, then):
    """Answers n short questions (the calibration) well, then as `then` does."""
    count = []

    def answer(c, body):
        count.append(1)
        (steady if len(count) <= n else then)(c, body)
    return answer


def busy(c, _body):
    text = b'{"error": {"message": "too many requests"}}'
    c.sendall(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))


def cut(c, _body):
    c.sendall(HEAD)
    chunk(c, {"choices": [{"delta": {"content": "x"}}]})


def unfinished(c, _body):
    cut(c, None)
    c.sendall(b"0\r\n\r\n")


def error_event(c, _body):
    cut(c, None)
    chunk(c, {"error": {"message": "worker lost"}})


@pytest.mark.parametrize("then,says", [
    (busy, "failed 2x: HTTP 429: too many requests"), (cut, "failed 2x: the connection ended early"),
    (unfinished, "failed 2x: the stream ended without [DONE]"),
    (error_event, "failed 2x: error event: worker lost")])
def test_failures_are_counted_and_named(then, says):
    rc, out, _ = bench("--url", Server(after(2, then)).url, "--concurrency", 2, "--requests", 2, "--input", 9,
                       "--output", 4, "--chat")
    assert rc == 1 and says in out, out


@pytest.mark.parametrize("args,says", [
    (["--url", "http://127.0.0.1:1"], "one of the arguments --rate --concurrency is required"),
    (["--url", "http://127.0.0.1:1", "--rate", "0"], "0 is not above 0"),
    (["--rate", "1"], "--url"),
    (["--url", "http://127.0.0.1:1", "--rate", "1"], "cannot reach http://127.0.0.1:1"),
    (["--url", "ftp://x", "--rate", "1"], "is not http://HOST:PORT"),
])
def test_usage_errors(args, says):
    rc, _, err = bench(*args, "--input", 3, "--output", 3)
    assert rc != 0 and says in err and "Traceback" not in err, err
    p = subprocess.run([BENCH, "frobnicate"], stderr=subprocess.PIPE, timeout=30)
    assert p.returncode == 2 and b"unknown command" in p.stderr


def test_against_the_cluster(cluster):
    before = cluster.metrics("conductor")
    rc, out, err = bench("--url", cluster.url, "--concurrency", 4, "--requests", 8, "--input", 64, "--output", 16)
    assert rc == 0, out + err
    assert values(out)["serve_tokens"] > 0 and "answer 16;" in out
    prompt = int(re.search(r"prompt (\d+) tokens", out)[1])
    assert 56 <= prompt <= 72
    key = [k for k in before if k.startswith("vllm:generation_tokens_total")]
    if key:
        assert cluster.metrics("conductor")[key[0]] - before[key[0]] >= 8 * 16

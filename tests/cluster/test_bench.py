"""baton-bench serve: what it measures against servers whose times are known, what it says about failures, and
the cluster itself. baton-bench kv: every mode as a user would run it."""
import csv
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree

import pytest

from conftest import ROOT, wait_for

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
        self.answer, self.bodies, self.heads = answer, [], []
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
                self.heads.append(h.decode().lower())
                if h.lower().startswith(b"content-length:"):
                    size = int(h.split(b":")[1])
            body = f.read(size)
            if b"/v1/models" in line:
                text = b'{"data": [{"id": "m"}]}'
                c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                f.read(1)  # the answer's length says where it ends, not the connection
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
    """First token after 150 ms, then one every 20 ms but for one gap of 100 ms: 430 ms for eleven."""
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
                         "--chat", "--csv", tmp_path / "o.csv", "--ttft", 1000, "--tbt", 0.0001)
    assert rc == 0, out + err
    v = values(out)
    # The server's sleeps bound from below how long an answer takes from its request, but no gap between two tokens: a client
    # that was late for the first sees a short one. From above one figure bounds the other.
    assert 150 <= v["serve_ttft_p50"] <= v["serve_e2e_p50"] and v["serve_e2e_p50"] >= 430
    assert v["serve_gap_p50"] <= v["serve_tbt_p50"] <= v["serve_e2e_p50"]
    assert v["serve_goodput"] == 0  # no request has a TBT of 100 ns
    with open(tmp_path / "o.csv") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == 8 and all(r["tokens"] == "11" and not r["error"] for r in rows)
    assert all(float(r["ttft_ms"]) >= 150 and float(r["e2e_ms"]) >= 430 for r in rows), rows
    # The busiest machine lets one of eight clients be in time.
    assert min(float(r["ttft_ms"]) for r in rows) < 10000 and max(float(r["tbt_ms"]) for r in rows) >= 100, rows
    assert max(float(r["e2e_ms"]) - float(r["ttft_ms"]) for r in rows) >= 250, rows
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


def sends(*events, head=HEAD, end=b"0\r\n\r\n"):
    def answer(c, _body):
        c.sendall(head)
        for event in events:
            chunk(c, event)
        c.sendall(end)
    return answer


TOKEN = {"choices": [{"delta": {"content": "\u00e9"}}]}


def in_single_bytes(c, _body):
    c.sendall(HEAD)
    for b in b"".join(b"data: %s\n\n: ping\n\n" % e for e in (json.dumps(TOKEN, ensure_ascii=False).encode(), b"[DONE]")):
        c.sendall(b"1;x=y\r\n%c\r\n" % b)
    c.sendall(b"0\r\nX: trailer\r\n\r\n")


@pytest.mark.parametrize("answer, says", [
    (sends(TOKEN, b"[DONE]", end=b""), "1 answered, 0 failed"),  # it leaves without the last chunk
    (in_single_bytes, "1 answered, 0 failed"),
    (sends(TOKEN, b"[DONE]", head=b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD), "1 answered, 0 failed"),
    (sends({**TOKEN, "error": None, "usage": None}, {"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": "2"}},
           b"[DONE]"), "1 answered, 0 failed"),
    (sends(TOKEN, {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens_details": [1]}}, b"[DONE]"), "1 answered, 0 failed"),
    (sends(b"5"), "failed 1x: an event is not of this API: 5"),
    (sends({"choices": [{"delta": "x"}]}), "failed 1x: an event is not of this API"),
    (sends({"error": "boom"}), "failed 1x: error event: boom"),
    (sends(100000 * b"["), "failed 1x: an event is not JSON"),
    (sends(TOKEN, end=b"-5\r\nhello\r\n"), "failed 1x: a chunk of the answer has no size"),
    (sends(head=b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n"), "failed 1x: the answer's Content-Length is five"),
    (sends(head=b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\nContent-Length: 16\r\n\r\n",
           end=b'{"error":"busy"}'), 'failed 1x: HTTP 429: {"error":"busy"}'),
], ids=range(12))
def test_strange_answers(answer, says):
    """Whatever comes is counted: as an answer if it is one, else as a failure with its reason."""
    rc, out, err = bench("--url", Server(after(2, answer)).url, "--concurrency", 1, "--requests", 1, "--input", 9, "--output", 2,
                         "--chat", "--timeout", 20)
    assert says in out and rc == ("failed 1x" in says) and not err, out + err


def crlf(c, body):
    """As sse-starlette writes it: CRLF, comments, an event's name beside its data; no usage, no end of the connection."""
    c.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n: hello\r\n\r\n")
    for i in range(body["max_tokens"]):
        time.sleep(0.01)
        c.sendall(b'event: chunk\r\ndata:{"choices":[{"text":"\xc3\xa9"}]}\r\n\r\n')
    c.sendall(b": ping\ndata: [DONE]\r\n\r\n")
    c.recv(1)


@pytest.mark.parametrize("load", [("--rate", 50, "--requests", 3, "--input", 20, "--output", 4),
                                  ("--trace", os.path.join(ROOT, "tests", "sim", "small.jsonl"), "--requests", 3,
                                   "--length-scale", 0.01, "--speed", 1000)])
def test_a_server_with_another_accent(load, tmp_path):
    s = Server(crlf)
    rc, out, err = bench("--url", s.url, *load, "--csv", tmp_path / "o.csv")
    assert rc == 0 and "3 answered" in out, out + err
    with open(tmp_path / "o.csv") as f:
        rows = list(csv.DictReader(f))
    assert sorted(int(r["tokens"]) for r in rows) == sorted(b["max_tokens"] for b in s.bodies[-3:])


@pytest.mark.parametrize("args,says", [
    (["--url", "http://127.0.0.1:1"], "one of the arguments --rate --concurrency --trace is required"),
    (["--url", "http://127.0.0.1:1", "--rate", "0"], "0 is not a number above 0"),
    (["--rate", "1"], "--url"),
    (["--url", "http://127.0.0.1:1", "--rate", "1"], "cannot reach http://127.0.0.1:1"),
    (["--url", "ftp://x", "--rate", "1"], "is not http://HOST:PORT"),
])
def test_usage_errors(args, says):
    rc, _, err = bench(*args, "--input", 3, "--output", 3)
    assert rc != 0 and says in err and "Traceback" not in err, err
    p = subprocess.run([BENCH, "frobnicate"], stderr=subprocess.PIPE, timeout=30)
    assert p.returncode == 2 and b"unknown command" in p.stderr


# ---- replay of a trace ----

def write_trace(path, *requests):
    with open(path, "w") as f:
        for at, n, out, ids in requests:
            f.write(json.dumps({"timestamp": at, "input_length": n, "output_length": out, "hash_ids": ids}) + "\n")
    return path


def stamped(log):
    def answer(c, body):
        log.append((time.monotonic(), body))
        c.sendall(HEAD)
        chunk(c, {"choices": [{"delta": {"content": "x"}, "text": "x"}]})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        n = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        chunk(c, {"choices": [], "usage": {"prompt_tokens": n, "completion_tokens": body["max_tokens"],
                                           "prompt_tokens_details": {"cached_tokens": n // 2}}})
        chunk(c, b"[DONE]")
        c.sendall(b"0\r\n\r\n")
    return answer


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


TRACE = ((5000, 1100, 40, [7, 8, 9]), (5000, 1100, 2, [7, 8, 10]), (6200, 600, 80, [7, 11]), (8000, 512, 0, [12]))


@pytest.mark.parametrize("ids", [[], ["--ids", "300:1500"]])
def test_a_trace_is_replayed_with_its_sharing(tmp_path, ids):
    log = []
    s = Server(stamped(log))
    path = write_trace(tmp_path / "t.jsonl", *TRACE)
    rc, out, err = bench("--url", s.url, "--trace", path, "--speed", 2, "--length-scale", 0.125, "--output-scale", 0.5,
                         "--ttft", 60000, "--tbt", 60000, "--slo", "--csv", tmp_path / "o.csv",
                         "--svg", tmp_path / "o.svg", *ids)
    assert rc == 0, out + err
    sent = log if ids else log[2:]  # two short questions tell how many tokens a word has
    assert len(sent) == 4, out
    # In the trace's order, whenever they came: none is sent early (start_s below), any may be late on a busy machine.
    sent.sort(key=lambda e: (-len(e[1]["prompt"] if ids else e[1]["prompt"].split()), e[1]["max_tokens"]))
    # An eighth of the prompts' and half of the answers' tokens; blocks of 64, shared as hash_ids are.
    prompts = [b["prompt"] if ids else b["prompt"].split() for _, b in sent]
    assert [len(p) for p in prompts] == [138, 138, 75, 64]
    assert [b["max_tokens"] for _, b in sent] == [1, 20, 40, 1]
    assert common(prompts[0], prompts[1]) in range(128, 131)  # and then by chance
    assert common(prompts[0], prompts[2]) in range(64, 67)
    assert common(prompts[0], prompts[3]) < 3
    assert not ids or all(300 <= t < 1500 for p in prompts for t in p)
    assert s.heads.count("x-slo-ttft-ms: 60000") == s.heads.count("x-slo-tbt-ms: 60000") == len(log)
    v = values(out)
    assert v["serve_goodput"] > 0 and v["serve_cached"] == pytest.approx(0.5, abs=0.01)
    assert "no bounds 0.4638" in out  # 3 of the 512-token blocks of 3312 tokens, each prompt's second use
    with open(tmp_path / "o.csv") as f:
        rows = list(csv.DictReader(f))
    assert [(r["due_s"], r["input_length"], r["prompt_tokens"]) for r in rows][2:] == [("0.6", "600", "75"), ("1.5", "512", "64")]
    assert all(float(r["start_s"]) >= float(r["due_s"]) for r in rows)
    svg = xml.etree.ElementTree.parse(tmp_path / "o.svg").getroot()
    assert svg.tag.endswith("svg") and "objective 60000 ms" in (tmp_path / "o.svg").read_text()
    # Another seed asks something else, the same one the same.
    again, other = [], []
    for seed, to in ((1, again), (2, other)):
        bench("--url", Server(stamped(to)).url, "--trace", path, "--speed", 1000, "--length-scale", 0.125,
              "--seed", seed, "--ids", "300:1500")
    assert sorted(b["prompt"] for _, b in other) != sorted(b["prompt"] for _, b in again)
    assert not ids or sorted(b["prompt"] for _, b in again) == sorted(prompts)


def test_parts_of_traces(tmp_path):
    csv_trace = tmp_path / "azure.csv"
    csv_trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                         "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51.2225670,3000,55\n")
    log = []
    s = Server(stamped(log))
    rc, out, err = bench("--url", s.url, "--trace", csv_trace, "--ids", "1:9", "--speed", 100, "--longest", 600)
    assert rc == 0 and "1 of 3 requests are longer than 600 tokens and left out" in out, out + err
    assert sorted(len(b["prompt"]) for _, b in log) == [374, 396]
    del log[:]
    rc, out, _ = bench("--url", s.url, "--trace", csv_trace, "--ids", "1:9", "--from", 0.4, "--requests", 1)
    assert rc == 0 and [len(b["prompt"]) for _, b in log] == [396]
    rc, _, err = bench("--url", s.url, "--trace", csv_trace, "--longest", 10)
    assert rc != 0 and "none of 3 requests" in err and "Traceback" not in err


def test_refusals_of_a_replay_are_counted(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", *TRACE)
    rc, out, _ = bench("--url", Server(busy).url, "--trace", path, "--ids", "1:9", "--speed", 100)
    assert rc == 1 and "no request succeeded: 4 refused, 0 failed" in out
    log, asked = [], []

    def some(c, body):
        asked.append(1)
        (busy if len(asked) == 2 else stamped(log))(c, body)
    rc, out, _ = bench("--url", Server(some).url, "--trace", path, "--ids", "1:9", "--speed", 100)
    assert rc == 0 and "3 answered, 1 refused, 0 failed" in out, out


def test_files_that_cannot_be_written(tmp_path):
    """Before the load, where that can be known; else what was measured is printed all the same."""
    path, log = write_trace(tmp_path / "t.jsonl", *TRACE[:2]), []
    args = ("--url", Server(stamped(log)).url, "--trace", path, "--ids", "1:9")
    for option in ("--csv", "--svg"):
        rc, out, err = bench(*args, option, tmp_path / "none" / "o")
        assert rc == 1 and f"baton-bench: {tmp_path}/none/o: No such file" in err and not out and not log, (out, err)
        rc, out, err = bench(*args, option, "/dev/full")
        assert rc == 1 and "baton-bench: /dev/full: No space left" in err and values(out)["serve_requests"] > 0, err
        log.clear()


@pytest.mark.parametrize("lines", [
    ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:47.9305900,396,109"),
    ("timestamp,context,generated", "2024-05-10 00:00:00.009930+00:00,374,44", "2024-05-10 00:00:01.259930+00:00,396,109"),
    ("2024-05-10T00:00:00Z,374,44", "2024-05-09 19:00:01.25-05:00,396,109"),
    ('Model,"GeneratedTokens",TIMESTAMP,ContextTokens', '"a,b",44,2024-05-10 00:00:00,374', '"a,b", 109 ,"2024-05-10 00:00:01.25",396'),
])
def test_traces_of_azure(tmp_path, lines):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    sys.path.insert(0, os.path.dirname(BENCH))
    import traces
    a, b = traces.load(path)
    assert (a.input, a.output, b.input, b.output) == (374, 44, 396, 109)
    assert a.at_ms == 0 and abs(b.at_ms - 1250) < 0.01


def test_a_compressed_trace(tmp_path):
    (tmp_path / "t.jsonl.gz").write_bytes(b"\x1f\x8b\x08\0")
    rc, _, err = bench("--url", "http://127.0.0.1:9", "--trace", tmp_path / "t.jsonl.gz")
    assert rc == 1 and "t.jsonl.gz:1: it is compressed; gunzip it" in err


GOOD = json.dumps({"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]})


@pytest.mark.parametrize("second,says", [
    ("nonsense", ":2: neither TIMESTAMP,ContextTokens,GeneratedTokens"),
    ("{", ":2: not JSON"),
    ('{"timestamp": 1}', ":2: input_length is missing"),
    (GOOD.replace("600", '"600"'), ":2: input_length is '600', not a whole number from 1 to 100,000,000"),
    (GOOD.replace("600", "0"), ":2: input_length is 0"),
    (GOOD.replace("600", "6e400"), ":2: "),
    (GOOD.replace("[1, 2]", "[1]"), ":2: hash_ids has not one id for each 512 tokens"),
    (GOOD.replace("[1, 2]", "[1, -2]"), ":2: a hash id is -2"),
    (GOOD.replace('"timestamp": 1', '"timestamp": 0'), ":2: its time is before the line above; sort the trace by time"),
    (GOOD.replace('"timestamp": 1', '"timestamp": 1e300'), ":2: its time is more than thirty years behind"),
    (GOOD.replace('"timestamp": 1', '"timestamp": NaN'), ":2: timestamp is not a number of milliseconds"),
    ("TIMESTAMP,GeneratedTokens,Tokens", ":2: its columns are not TIMESTAMP, ContextTokens, GeneratedTokens and others"),
    (GOOD + GOOD, ":2: not JSON"),
    (GOOD + "\0", ":2: it contains a zero byte"),
    (GOOD.replace("[1, 2]", "[1.0, 2.0]"), ":2: a hash id is 1.0, not a whole number below 2^64"),
    (GOOD.replace('"output_length": 1', '"output_length": 200000000'), ":2: output_length is 200000000, not a whole number from 0 to 100,000,000"),
    pytest.param('{"a": ' + 100000 * "[", ":2: not JSON", id="deep"),
    pytest.param(200000 * "x", ":2: neither TIMESTAMP", id="long"),
    ("2023-13-16 18:15:46.6,3,4", ":2: "),
    ("2023-11-16 18:15:46.6,3,x", ":2: "),
])
def test_a_bad_trace_is_named_with_its_line(tmp_path, second, says):
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + "\n" + second + "\n")
    rc, out, err = bench("--url", "http://127.0.0.1:1", "--trace", path)
    assert rc != 0 and f"{path}{says}" in err and "Traceback" not in err, err


@pytest.mark.parametrize("args,says", [
    (["--trace", "/nonexistent"], "/nonexistent: No such file or directory; give a Mooncake .jsonl"),
    (["--trace", os.devnull], f"{os.devnull}: no requests in it"),
    (["--trace", os.devnull, "--input", "3"], "do not go with --trace"),
    (["--trace", os.devnull, "--ids", "1:9", "--chat"], "--ids does not go with --chat"),
    (["--trace", os.devnull, "--ids", "9"], "9 is not LOW:HIGH"),
    (["--trace", os.devnull, "--from", "2"], "2 is not from 0 to 1"),
    (["--trace", os.devnull, "--from", "1"], "--from is not before --to"),
    (["--trace", os.devnull, "--speed", "nan"], "nan is not a number above 0"),
    (["--trace", os.devnull, "--length-scale", "inf"], "inf is not a number above 0"),
    (["--rate", "1"], "--input is required"),
])
def test_usage_errors_of_a_replay(args, says):
    rc, _, err = bench("--url", "http://127.0.0.1:1", *args)
    assert rc != 0 and says in err and "Traceback" not in err, err


def test_a_trace_against_the_cluster(cluster, tmp_path):
    """Prompts of three turns each: the second and third find in the caches what the trace shares."""
    turns, at = [], 0
    for turn in (2, 4, 6):
        for user in range(4):
            turns.append((at, 512 * turn + 100, 64, [1] + [100 * user + k for k in range(turn)]))
            at += 1500
    path = write_trace(tmp_path / "t.jsonl", *turns)
    rc, out, err = bench("--url", cluster.url, "--trace", path, "--speed", 3, "--length-scale", 1 / 32,
                         "--output-scale", 0.125, "--ids", "300:1500", "--ttft", 60000, "--tbt", 60000)
    assert rc == 0, out + err
    assert "12 answered, 0 refused, 0 failed" in out and "answer 8;" in out
    assert values(out)["serve_cached"] > 0.2, out  # without bounds 0.6


def test_against_the_cluster(cluster):
    before = cluster.metrics("conductor")
    rc, out, err = bench("--url", cluster.url, "--concurrency", 4, "--requests", 8, "--input", 64, "--output", 16)
    assert rc == 0, out + err
    assert values(out)["serve_tokens"] > 0 and "answer 16;" in out
    prompt = int(re.search(r"prompt (\d+) tokens", out)[1])
    assert 56 <= prompt <= 72
    key, = [k for k in before if k.startswith("vllm:generation_tokens_total")]
    wait_for(lambda: cluster.metrics("conductor")[key] - before[key] >= 8 * 16, 60, "the tokens are counted")


def kv_bench(*args, timeout=300):
    p = subprocess.run([BENCH, "kv", *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       timeout=timeout)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


def test_kv_every_mode():
    code, out, err = kv_bench("--rounds", "1", "--seconds", "1")
    assert code == 0 and err == "", err  # no bar where there is no terminal
    got = values(out)
    for name in ("put", "get", "fetch", "stream", "lease_pairs_in_batches_of_64", "mixed_put", "mixed_get", "mixed_fetch",
                 "mixed_stream", "restart_ready", "restart_served"):
        assert got[f"kv_{name}"] > 0, out
    left = next(li for li in out.splitlines() if "kv_restart_left" in li)
    assert left.endswith(",1.000"), left  # sealed for a second: there after kill -9


def test_kv_named_modes():
    code, out, err = kv_bench("get", "put", "--rounds", "1")
    assert code == 0 and list(values(out)) == ["kv_put", "kv_get"], out + err


@pytest.mark.parametrize("args, says", [(["flow"], "no mode is called flow; there are put, lease"),
                                        (["--rounds", "0"], "--rounds and --seconds are positive")])
def test_kv_usage_errors(args, says):
    code, _, err = kv_bench(*args)
    assert code == 2 and says in err

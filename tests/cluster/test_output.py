"""Requests whose answers are far larger than they are, clients that do not read, and bodies of a thousand prompts: the
conductor's loop never stands still for them, its memory stays bounded, and another client is served meanwhile."""
import json
import socket
import time

import sanitizer
from conftest import wait_for

TICK_S = "0.02"  # CPU time of the loop's thread, which neighbours on the machine cannot lengthen
ECHO = {"echo": True, "logprobs": 20, "n": 16, "max_tokens": 0}


def send(cluster, **body):
    data = json.dumps(body, separators=(",", ":")).encode()
    s = socket.create_connection((cluster.host, cluster.port), timeout=60 * sanitizer.PATIENCE)
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
              b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return s


def resident(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS:"))


def read_all(s):
    """Length of the answer, how many choices have ended in it, and how it ends."""
    n, ended, tail = 0, 0, b""
    while piece := s.recv(1 << 20):
        n += len(piece)
        text = tail + piece
        ended += text.count(b'"finish_reason":"length"') - tail.count(b'"finish_reason":"length"')
        tail = text[-100:]
    s.close()
    return n, ended, tail


def quiet(metrics):
    return metrics["baton_http_generations_open"] == 0 and metrics['baton_http_answer_bytes{of="generations"}'] == 0


def test_hostile_answers(make_cluster):
    c = make_cluster("--nodes", "1", "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")
    conductor = c.daemon("conductor")
    before = resident(conductor["pid"])
    one = {"prompt": [5] * 8000, **ECHO}

    # 40 KB in, 44 MB out: whole, though made in pieces.
    n, ended, tail = read_all(send(c, **one))
    assert n > 40e6 and ended == 16 and tail.endswith(b"}\r\n0\r\n\r\n"), (n, ended, tail)

    # Twelve that read nothing hold their prompts, not their text; others are served.
    silent = [send(c, **one) for _ in range(12)]
    wait_for(lambda: c.metrics("conductor")['vllm:request_success_total{model_name="%s",finished_reason="length"}'
                                            % c.model] >= 13, 120, "all are answered")
    assert c.complete("O", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert resident(conductor["pid"]) - before < 128e6 or sanitizer.PATIENCE > 1
    for s in silent:
        s.close()
    wait_for(lambda: quiet(c.metrics("conductor")), 30, "what they held is free")

    # What could never be answered is refused before any work.
    status, _, body = c.request("POST", "/v1/completions", {"prompt": [[5] * 8000] * 80, **ECHO, "n": 1})
    assert status == 400 and b"conductor.http.answers_max" in body, (status, body)

    # Many prompts at once, and clients that leave all of them behind.
    assert len(c.post("/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 1})["choices"]) == 1024
    for body in ({"prompt": ["a"] * 1024}, {"prompt": [[5] * 8000] * 100}):
        s = send(c, **body, max_tokens=100, ignore_eos=True, stream=True)
        assert s.recv(100)
        time.sleep(0.2)
        s.close()
    wait_for(lambda: quiet(c.metrics("conductor")), 30, "what they left is cancelled")
    assert c.complete("O", max_tokens=4)["usage"]["completion_tokens"] == 4

    m = c.metrics("conductor")
    if sanitizer.PATIENCE == 1:
        ticks = 'baton_loop_tick_seconds_bucket{clock="cpu",le="%s"}'
        longest = m['baton_loop_tick_longest_seconds{clock="cpu"}']
        # A turn that is too long is so for each of the answers: one may have met a page fault or an interrupt.
        n = m[ticks % "+Inf"] - m[ticks % TICK_S]
        assert n <= 1, f"{n:.0f} turns of the loop took {TICK_S} s or more, the longest {longest} s"

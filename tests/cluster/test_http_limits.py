"""Clients that are slow, huge, half-open or gone, against a running cluster: each meets a limit, nobody
else waits for them, and nothing of theirs stays behind."""
import json
import os
import select
import socket
import threading
import time

import sanitizer
from conftest import scrape, wait_for

POST = b"POST /tokenize HTTP/1.1\r\nHost: a\r\n"


def address(cluster):
    return cluster.host, cluster.port


def generation(body):
    data = json.dumps(body).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(data)) + data


def disconnects(cluster):
    return cluster.metrics("conductor")["baton_http_disconnects_total"]


def nothing_open(cluster):
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 60,
             "no generation is open")


def test_ids_of_fds_do_not_leak(cluster):
    """Refused, half-sent and abandoned requests leave no descriptor behind."""
    pid = cluster.daemon("conductor")["pid"]

    def fds():
        return len(os.listdir(f"/proc/{pid}/fd"))

    before = fds()
    for i in range(200):
        s = socket.create_connection(address(cluster), timeout=60)
        s.sendall((b"GET / HTTP/1.1\r\nHo", b"\0", POST + b"Content-Length: 9\r\n\r\n")[i % 3])
        s.close()
    wait_for(lambda: fds() <= before + 2, 60, "descriptors are back")


def test_disconnect_is_noticed_at_once(cluster):
    http = cluster.daemon("conductor")["http"]
    name = "baton_http_disconnects_total"
    before = scrape(http)[name]
    s = socket.create_connection(address(cluster), timeout=60)
    body = b'{"prompt":"O","max_tokens":8000,"ignore_eos":true,"stream":true}'
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
              b"Content-Length: %d\r\n\r\n" % len(body) + body)
    got = b""
    while b"data: " not in got:
        piece = s.recv(4096)
        assert piece, got
        got += piece
    s.close()
    wait_for(lambda: scrape(http)[name] > before, 60, "the disconnect is counted")
    wait_for(lambda: scrape(http)["baton_http_generations_open"] == 0, 60, "the generation is gone")


def test_a_thousand_slow_headers_hold_up_nobody(cluster):
    """Slowloris: others get their answers while all of the slow may still go on; then every one of the slow gets its 408."""
    slow = [socket.create_connection(address(cluster), timeout=60) for _ in range(1000)]
    start = time.monotonic()
    try:
        for i, s in enumerate(slow):
            s.sendall((b"GET / HT", POST, b"G")[i % 3])
        assert cluster.complete("O", 1)["usage"]["completion_tokens"] == 1
        unanswered = select.poll()
        for s in slow:
            unanswered.register(s, select.POLLIN)
        assert unanswered.poll(0) == []
        for s in slow:
            assert s.recv(64).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - start > 4  # the header's deadline is 5 s for who has asked for nothing before
    finally:
        for s in slow:
            s.close()


def test_half_open_in_the_middle_of_a_request(cluster):
    """A client that stops sending in mid-request and half-closes is closed, not waited for."""
    for part in (b"GET / HT", POST + b"Content-Length: 9\r\n\r\nabc",
                 POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhe"):
        s = socket.create_connection(address(cluster), timeout=60)  # behind the header's deadline it would be a 408
        s.sendall(part)
        s.shutdown(socket.SHUT_WR)
        assert s.recv(100) == b""
        s.close()


def test_half_open_while_it_is_answered(cluster):
    """Who sends no more but waits for its answer gets it (nc -N); if it leaves then, its request ends."""
    before = disconnects(cluster)
    for stream, end in ((False, b'"completion_tokens":300'), (True, b"[DONE]\n\n\r\n0\r\n\r\n")):
        s = socket.create_connection(address(cluster), timeout=60)
        s.sendall(generation({"prompt": "O", "max_tokens": 300, "ignore_eos": True, "stream": stream}))
        s.shutdown(socket.SHUT_WR)
        got = b""
        while piece := s.recv(65536):
            got += piece
        assert end in got, got[-300:]
        s.close()
    assert disconnects(cluster) == before
    s = socket.create_connection(address(cluster), timeout=60)
    s.sendall(generation({"prompt": "O", "max_tokens": 8000, "ignore_eos": True}))
    s.shutdown(socket.SHUT_WR)
    assert s.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
    s.close()
    wait_for(lambda: disconnects(cluster) == before + 1, 60, "the disconnect is counted")
    nothing_open(cluster)


def test_a_reader_that_does_not_read_is_cut_off(cluster):
    """Unread output is bounded (1 MiB beside the kernel's buffers); the generation ends with it, and a client that goes on
    to read is told why."""
    slow = "baton_http_slow_readers_total"
    before = cluster.metrics("conductor")[slow]
    pid = cluster.daemon("conductor")["pid"]

    def resident_mib():
        with open(f"/proc/{pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2 ** 20

    base = resident_mib()
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect(address(cluster))
    s.sendall(generation({"prompt": "O", "max_tokens": 2000, "n": 16, "logprobs": 20,
                          "ignore_eos": True, "stream": True}))
    wait_for(lambda: cluster.metrics("conductor")[slow] == before + 1, 60, "its stream ends")
    if not sanitizer.KIND:  # a sanitizer keeps what is freed
        assert resident_mib() < base + 16  # it grows by 2; all of the stream has 35
    nothing_open(cluster)
    s.settimeout(60)
    got = b""
    while not got.endswith(b"\r\n0\r\n\r\n"):
        piece = s.recv(65536)
        assert piece, got[-300:]
        got += piece
    assert 2 ** 19 < len(got) < 2 ** 22
    last = got.split(b"data: ")[-1]
    assert b'"code":"slow_reader"' in last and b"read faster" in last, last
    s.close()


def test_a_whole_answer_may_be_large(cluster):
    """The bound is for streams; an answer of several MiB reaches a slow reader whole."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    s.settimeout(60)
    s.connect(address(cluster))
    data = json.dumps({"prompt": "word " * 400000}).encode()
    s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
              b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    got = bytearray()
    while True:
        piece = s.recv(65536)
        if not piece:
            break
        got += piece
    s.close()
    out = json.loads(bytes(got).split(b"\r\n\r\n", 1)[1])
    assert out["count"] == len(out["tokens"]) > 400000


def test_large_bodies_hold_up_nobody(cluster):
    """Megabytes to tokenize, which takes a thread some tenths of a second of its CPU: no turn of the control loop has part in it,
    so that the streams of others go on meanwhile."""
    def long_turns():
        m = cluster.metrics("conductor")
        return [m['baton_loop_tick_seconds_bucket{clock="cpu",le="%s"}' % le] for le in ("+Inf", "0.02")]

    big = {"prompt": "word and more, " * 250000}
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(cluster.request("POST", "/tokenize", big)[0])) for _ in range(3)]
    turns, quick = long_turns()
    events = cluster.stream("/v1/completions", {"prompt": "O", "max_tokens": 600, "ignore_eos": True})
    next(events)
    for t in threads:
        t.start()
    assert sum(1 for e in events if e != "[DONE]") == 599
    for t in threads:
        t.join()
    assert answers == [200] * 3
    all_turns, all_quick = long_turns()
    assert all_turns > turns and all_turns - all_quick == turns - quick, "a turn of the loop took more than 20 ms of CPU"


def test_more_large_bodies_than_are_read_at_once(cluster):
    """At most 64 wait to be read; more get 429 with a Retry-After. Nobody is left without an answer."""
    body = json.dumps({"prompt": "word and more, " * 20000}).encode()
    head = (b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
    socks = [socket.create_connection(address(cluster), timeout=60) for _ in range(120)]
    for s in socks:
        s.sendall(head + body[:-1])
    for s in socks:
        s.sendall(body[-1:])
    statuses = []
    for s in socks:
        got = s.recv(1 << 16)
        statuses.append(got[9:12])
        if statuses[-1] == b"429":
            assert b"Retry-After: " in got
        s.close()
    assert set(statuses) <= {b"200", b"429"} and b"200" in statuses

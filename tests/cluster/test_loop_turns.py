"""Request shapes that are made to keep the conductor's loop busy: hundreds of connections that send one short request behind
another, large bodies, a worker that is killed under thousands of requests. No turn of the loop takes 20 ms of CPU, and
another client is served meanwhile."""
import json
import os
import selectors
import signal
import socket
import time

import pytest

import sanitizer
from conftest import ROOT, Cluster, scrape, stop_all, wait_for
from restarts import Restarts

TICK_S = 0.02  # CPU time of the loop's thread, which neighbours on the machine hardly lengthen
LONG_ONES = 3  # turns that may take longer, of all floods together
LOAD_S = 0.5  # hundreds of turns
CONNECTIONS = 200
BLOB = 64 * 1024  # of requests that a connection sends ahead, again and again
NULL = ("--nodes", "1", "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")


def get(path):
    return b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n"


def post(path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(data)) + data


def chat(n, **more):
    return post(b"/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * n}], "max_tokens": 1, **more})


# What each connection sends, over and over.
SHAPES = {
    "health": [get(b"/health")],
    "models": [get(b"/v1/models")],
    "metrics": [get(b"/metrics")],
    "tokenize_tiny": [post(b"/tokenize", {"prompt": "a"})],
    "tokenize_8k": [post(b"/tokenize", {"prompt": "word " * 1600})],
    "chat": [chat(1000)],
    "chat_refused": [chat(1000, max_tokens=10**9)],
    "bad": [post(b"/v1/completions", b"{")],
    "completions": [post(b"/v1/completions", {"prompt": "a", "max_tokens": 1})],
    "body_1m": [post(b"/tokenize", {"prompt": "word " * 200000})],
    "bodies_of_70k": [post(b"/detokenize", {"tokens": [5] * 30000})],
    "all": [get(b"/metrics"), post(b"/tokenize", {"prompt": "word " * 1600}), chat(1000), get(b"/v1/models"),
            post(b"/v1/completions", {"prompt": "a", "max_tokens": 1}), post(b"/tokenize", b"{" * 8000)],
}


class Flood:
    """Connections that send requests as fast as they are taken, and read all answers (or none)."""

    def __init__(self, cluster, requests, reads=True):
        self.address, self.reads = (cluster.host, cluster.port), reads
        self.selector = selectors.DefaultSelector()
        self.blobs = []
        for i in range(len(requests)):
            turn = b"".join(requests[i:] + requests[:i])
            self.blobs.append(turn * max(1, BLOB // len(turn)))
        self.bytes_in = 0
        for i in range(CONNECTIONS):
            self.connect(i)

    def connect(self, i):
        s = socket.create_connection(self.address, timeout=10)
        s.setblocking(False)
        self.selector.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE, [i, 0])

    def run(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key, events in self.selector.select(0.1):
                self.serve(key.fileobj, key.data, events)

    def serve(self, s, state, events):
        blob = self.blobs[state[0] % len(self.blobs)]
        try:
            if events & selectors.EVENT_WRITE:
                state[1] = (state[1] + s.send(blob[state[1]:])) % len(blob)
            if events & selectors.EVENT_READ and self.reads:
                got = s.recv(1 << 18)
                self.bytes_in += len(got)
                if not got:
                    raise ConnectionError
        except BlockingIOError:
            pass
        except OSError:
            self.selector.unregister(s)
            s.close()
            self.connect(state[0])

    def close(self):
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()


def from_elsewhere(cluster, request):
    """The status of the answer to another client, which to the server is one with another address: what the flood's own
    client has too many of, it refuses."""
    with socket.create_connection((cluster.host, cluster.port), 60 * sanitizer.PATIENCE, ("127.0.0.2", 0)) as s:
        s.sendall(request)
        return int(s.recv(65536).split()[1])


def check_turns(cluster, what, long_ones):
    """A shape that takes too long in one turn does so in hundreds: a few turns may meet a page fault or an interrupt."""
    m = cluster.metrics("conductor")
    longest = m['baton_loop_tick_longest_seconds{clock="cpu"}']
    n = [m[f'baton_loop_tick_seconds_bucket{{clock="cpu",le="{le}"}}'] for le in ("+Inf", TICK_S)]
    if longest > TICK_S / 2:
        with open(os.path.join(cluster.state_dir, "logs", "conductor.log"), errors="replace") as f:
            print("".join(line for line in f if "slow_loop_tick" in line)[-500:])
    print(f"loop_turns {what}: the longest took {longest * 1e3:.1f} ms of CPU")
    assert n[0] - n[1] <= long_ones or sanitizer.PATIENCE > 1, \
        f"{what}: {n[0] - n[1]:.0f} turns of the loop took {TICK_S} s of CPU, the longest {longest * 1e3:.1f} ms"


@pytest.fixture(scope="module")
def running():
    made = [Cluster(*NULL)]
    yield made[0]
    stop_all(made)


@pytest.fixture
def idle(running):
    """A cluster that floods of other shapes have left. Its turns are those of all of them: the first to take too long is the
    one that fails first."""
    wait_for(lambda: running.metrics("conductor")["baton_http_generations_open"] == 0, 60, "nothing is left of the last flood")
    return running


@pytest.mark.parametrize("shape", SHAPES)
def test_pipelined(idle, shape):
    c = idle
    flood = Flood(c, SHAPES[shape])
    try:
        flood.run(LOAD_S)
        end = time.monotonic() + 30 * sanitizer.PATIENCE
        while flood.bytes_in == 0:  # on a busy machine the first answers take longer
            assert time.monotonic() < end
            flood.run(0.1)
        pid = os.fork()
        if pid == 0:  # the flood goes on beside the other client
            flood.run(60 * sanitizer.PATIENCE)
            os._exit(0)
        try:
            start = time.monotonic()
            assert from_elsewhere(c, get(b"/version")) == 200
            assert from_elsewhere(c, post(b"/tokenize", {"prompt": "a"})) == 200
            took = time.monotonic() - start
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(f"loop_turns {shape}: {flood.bytes_in / LOAD_S / 1e6:.1f} MB/s of answers, another client's requests {took * 1e3:.0f} ms")
        check_turns(c, shape, LONG_ONES)
        assert took < 30 * sanitizer.PATIENCE, f"two short requests took {took:.1f} s"
    finally:
        flood.close()


def test_nobody_reads(idle):
    """The same requests from connections that never read an answer."""
    c = idle
    flood = Flood(c, SHAPES["all"], reads=False)
    try:
        flood.run(LOAD_S)
        assert c.request("GET", "/version")[0] == 200
        check_turns(c, "nobody reads", LONG_ONES)
    finally:
        flood.close()


def held_by(worker):
    """Requests that a worker has, computing or waiting."""
    return sum(v for k, v in scrape(worker["http"]).items()
               if k.startswith(("baton_worker_requests_running", "baton_worker_requests_waiting")))


def read_answer(s):
    got = b""
    while b'"usage"' not in got[-4096:]:
        piece = s.recv(1 << 20)
        assert piece, got[-500:]
        got += piece
    return got


def test_a_worker_is_killed_under_thousands():
    """Thousands of requests are planned anew when their worker is lost, and all of them are answered.

    The only decode worker takes five seconds for each step. At most `slots` of its requests end every 5 * `tokens` seconds, so
    it has nearly all of them when it is killed, however slowly this machine sends them. Another worker has joined by then and
    answers all, without that pace. Done in one turn of the loop, the planning of 8,000 requests takes more than 30 ms of CPU."""
    n, prompts, tokens, slots = 8000, 500, 8, 128
    many = {"conductor.max_running": n, "conductor.max_waiting": n, "conductor.stall_ms": "10m",
            "decode.engine.device": "null", "decode.engine.max_slots": slots, "decode.engine.pages": 4 * slots,
            "decode.engine.calibrate_ms": 0, "decode.worker.max_requests": n, "kvstore.slab_bytes": "256MiB"}
    r = Restarts("--model", os.path.join(ROOT, "deploy/models/shakespeare-draft-1m"), "--nodes", "1", "--prefill", "0",
                 "--decode", "1", *[word for key, value in many.items() for word in ("--set", f"{key}={value}")])
    socks = []
    try:
        slow = r.members("decode")[0]
        argv, env, cwd = r.args["decode", slow["name"]]
        r.c.pace(5000)
        for _ in range(n // prompts):
            s = socket.create_connection((r.c.host, r.c.port), timeout=120 * sanitizer.PATIENCE)
            s.sendall(post(b"/v1/completions", {"prompt": ["a"] * prompts, "max_tokens": tokens, "ignore_eos": True}))
            socks.append(s)
        wait_for(lambda: held_by(slow) > 0.9 * n, 60, "the worker has nearly all of them")
        r.spawn([*argv, "--set", "worker.index=1"], env, cwd, "decode-fast.log")
        wait_for(lambda: len([m for m in r.members("decode") if m["session_up"]]) == 2, 30, "another worker joins")
        assert held_by(slow) > 0.8 * n
        r.kill_member(slow)
        r.c.pace(0)
        for s in socks:
            got = read_answer(s)
            assert got.startswith(b"HTTP/1.1 200") and got.count(b'"finish_reason":"length"') == prompts, got[:300]
        again = r.c.metrics("conductor")["baton_requests_replanned_total"]
        assert again > 0.8 * n, again
        check_turns(r.c, f"a worker is killed under {again:.0f} requests", 0)
    finally:
        for s in socks:
            s.close()
        r.stop()

"""Daemons die, hang, are drained under running streams: the streams go on with the same tokens.

Every fault meets streams of all kinds at once: greedy, sampled, with penalties, of two choices, with
a stop string of which a part is held back, with characters whose bytes come in several tokens.
"""
import http.client
import json
import os
import signal
import threading
import time

import pytest

from admin import Admin
from conftest import wait_for
from restarts import SLOW_MS, Restarts
from sanitizer import PATIENCE

PROMPT = "KING HENRY V:\nWe few, we happy few, we band of brothers; " * 6
TOKENS = 450
AT = 20  # tokens of the first stream until something happens
EXACT = "avx512_bf16" in open("/proc/cpuinfo").read()
BASE = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0,
        "stream_options": {"include_usage": True}}


class Stream:
    """One streamed request, by choice: text and token logprobs."""

    def __init__(self, at, body):
        self.at, self.body = at, body
        self.text, self.lps, self.reason = {}, {}, {}
        self.usage = self.error = None
        self.done, self.gap, self.last = False, 0.0, None

    def take(self, ev):
        now = time.monotonic()
        if self.last is not None:
            self.gap = max(self.gap, now - self.last)
        self.last = now
        if "error" in ev:
            self.error = ev["error"]
            return
        self.usage = ev.get("usage") or self.usage
        for ch in ev.get("choices", []):
            i = ch["index"]
            assert self.reason.get(i) is None, "a choice goes on behind its end"
            self.text[i] = self.text.get(i, "") + ch["text"]
            self.lps.setdefault(i, []).extend(
                ch["logprobs"]["token_logprobs"] if ch.get("logprobs") else [])
            self.reason[i] = ch["finish_reason"]

    def run(self):
        host, port = self.at
        c = http.client.HTTPConnection(host, port, timeout=60 * PATIENCE)
        try:
            c.request("POST", "/v1/completions", json.dumps(dict(self.body, stream=True)),
                      {"Content-Type": "application/json"})
            r = c.getresponse()
            assert r.status == 200, r.read()
            buf = b""
            while True:
                piece = r.read1(65536)
                if not piece:
                    break
                buf += piece
                while b"\n\n" in buf:
                    event, buf = buf.split(b"\n\n", 1)
                    assert not self.done and event.startswith(b"data: ")
                    if event == b"data: [DONE]":
                        self.done = True
                    else:
                        self.take(json.loads(event[6:]))
        except (OSError, http.client.HTTPException) as e:
            self.error = repr(e)
        finally:
            c.close()

    def seen(self):
        return self.text, self.lps, self.reason, self.usage


def has_tokens(stream, n):
    return len(stream.lps.get(0, [])) >= n  # an event of the stream may have several tokens


def run_streams(at, bodies, on_event=None, when=AT, before=None, slow=None):
    """Runs all at once; on_event is called once, when the first of them has `when` tokens, before() at half of them. With
    more than one token until then, the first one starts when every other one has a token, so that both meet all of them: on
    a busy machine the first stream can have a hundred tokens before the last client has sent its request. slow: the cluster,
    whose steps take SLOW_MS longer until then, so that no stream ends before."""
    streams = [Stream(at, b) for b in bodies]
    ts = [threading.Thread(target=s.run) for s in streams]
    if slow:
        slow.pace(SLOW_MS)
        on_event = on_event or (lambda: None)
    try:
        for t in ts[1:]:
            t.start()
        if when > 1:
            wait_for(lambda: all(has_tokens(s, 1) or s.error for s in streams[1:]), 30, "the other streams run", every_s=0.005)
        ts[0].start()
        for tokens, what in ((when + 1) // 2, before), (when, on_event):
            if what:
                wait_for(lambda: has_tokens(streams[0], tokens), 30, "the first stream runs", every_s=0.005)
                what()
    finally:
        if slow:
            slow.pace(0)
    for t in ts:
        t.join(90 * PATIENCE)
    return streams


def same(got, want):
    """Nothing lost, nothing twice, nothing else."""
    for g, w in zip(got, want):
        assert g.error is None and g.done, (g.body, g.error)
        if EXACT:
            assert g.seen() == w.seen(), g.body
        else:  # near-ties may fall the other way after a re-plan: counts are still to be right
            assert {k: len(v) for k, v in g.lps.items()} == {k: len(v) for k, v in w.lps.items()}
            assert g.usage["completion_tokens"] == sum(len(v) for v in g.lps.values())


def byte_tokens(c):
    """Tokens of single bytes that are parts of characters."""
    ids = set()
    for text in "é", "€", "ß":
        ids |= set(c.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])
    return sorted(ids)


class Setting:
    """Prefill on n1, decode on n2 and n3; all streams of a run start on n3's decode worker."""

    def __init__(self):
        self.r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2")
        c = self.c = self.r.c
        self.at = (c.host, c.port)
        self.admin = Admin(self.r.addr)
        greedy = run_streams(self.at, [BASE])[0].text[0]
        # Held back for about 100 tokens from event AT on, and then it does not match after all...
        held = greedy[AT * 3:AT * 3 + 300] + "\n\nnever"
        ends = greedy[AT * 3:AT * 3 + 800]  # ... and one that does
        bias = {str(i): 100 for i in byte_tokens(c)}
        self.bodies = [
            BASE, dict(BASE, temperature=0.8, seed=11),
            dict(BASE, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.1),
            dict(BASE, temperature=0.8, seed=5, n=2), dict(BASE, stop=[held, "never either"]),
            dict(BASE, stop=[ends]), dict(BASE, temperature=1.0, seed=3, logit_bias=bias)]
        self.want = self.run()
        assert all(w.done for w in self.want)
        for w in self.want[:4]:
            assert all(len(v) == TOKENS for v in w.lps.values())
        assert len(self.want[3].lps) == 2 and self.want[3].text[0] != self.want[3].text[1]
        assert self.want[4].text == self.want[0].text
        assert self.want[5].text[0] == greedy[:AT * 3] and self.want[5].reason[0] == "stop"
        assert "\ufffd" in self.want[6].text[0] or "é" in self.want[6].text[0]

    def run(self, on_event=None, when=AT):
        """All bodies at once; on n3 until on_event happens."""
        self.admin.drain("n2", force=True)
        try:
            return run_streams(self.at, self.bodies, on_event, when, lambda: self.admin.undrain("n2"),
                               slow=self.c if on_event else None)
        finally:
            self.admin.undrain("n2")


@pytest.fixture(scope="module")
def setting():
    s = Setting()
    yield s
    s.admin.close()
    s.r.stop()


@pytest.mark.parametrize("kind,node", [("decode", "n3"), ("kvstore", "n3")])
def test_a_killed_daemon_costs_time_not_tokens(setting, kind, node):
    r = setting.r
    before = r.total("baton_requests_replanned_total")
    victim, killed = r.members(kind, node)[0], []
    try:
        got = setting.run(lambda: killed.append(r.kill_member(victim)))
        same(got, setting.want)
        if kind == "decode":  # n = 2 is one plan for two choices
            assert r.total("baton_requests_replanned_total") - before >= len(got)
            # A request ends when its workers have said so, which may be after the client has its answer.
            wait_for(lambda: setting.r.ctl("requests") == [], 30, "nothing is left of them")
    finally:
        for m in killed:
            r.start_again(m)


def test_a_killed_prefill_worker(setting):
    """While it has most of the prompts still to do."""
    r = setting.r
    victim, killed = r.members("prefill", "n1")[0], []
    try:
        got = setting.run(lambda: killed.append(r.kill_member(victim)), when=1)
        same(got, setting.want)
    finally:
        for m in killed:
            r.start_again(m)


@pytest.mark.parametrize("kind", ["decode", "kvstore"])
def test_one_that_stands_still_and_wakes(setting, kind):
    """Until its lease has ended and everybody takes it for dead; a worker's late tokens are of an old epoch."""
    r, pid = setting.r, setting.r.members(kind, "n3")[0]["pid"]
    try:
        same(setting.run(lambda: os.kill(pid, signal.SIGSTOP)), setting.want)
        wait_for(lambda: not r.members(kind, "n3"), 30, "it is no member any more")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: r.members(kind, "n3") and all(m["session_up"] for m in r.members(kind)), 30, "it is back")
    same(setting.run(), setting.want)


def test_a_drained_node(setting):
    r = setting.r
    before = len(r.c.replans())
    try:
        got = setting.run(lambda: setting.admin.drain("n3"))
        same(got, setting.want)
        # Nothing has failed. (A daemon that this machine does not run for two seconds is lost.)
        assert not [why for why in r.c.replans()[before:] if "was lost" not in why]
        assert r.total("baton_requests_moved_total") >= 1
    finally:
        setting.admin.undrain("n3")


def test_etcd_stands_still(setting):
    pid, n = setting.c.daemon("etcd")["pid"], len(setting.r.members())
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(2):  # 6 s: longer than the members' lease
            same(run_streams(setting.at, setting.bodies[:1]), setting.want[:1])
            time.sleep(3)
        same(run_streams(setting.at, setting.bodies[:1]), setting.want[:1])
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1)  # leases that ended meanwhile are gone by now
    wait_for(lambda: sum(m["state"] == "ready" and m["session_up"] or m["kind"] == "conductor" for m in setting.r.members()) == n, 30,
             "all are members, and met")
    same(setting.run(), setting.want)


def test_a_killed_conductor_ends_its_own_streams_only(setting):
    r = setting.r
    p, host, port = r.second_conductor()
    other = [Stream((host, port), dict(b, max_tokens=4000)) for b in setting.bodies[:2]]
    ts = [threading.Thread(target=s.run) for s in other]

    def kill():
        for t in ts:
            t.start()
        wait_for(lambda: all(len(s.lps.get(0, [])) >= 20 for s in other), 30, "its streams run")
        p.kill()

    got = run_streams(setting.at, setting.bodies, kill, when=5, slow=setting.c)
    for t in ts:
        t.join(30 * PATIENCE)
    same(got, setting.want)
    assert all(not s.done for s in other)  # cut off, and never a false [DONE]
    for s, w in zip(other, setting.want):
        n = min(len(s.text[0]), len(w.text[0]))
        assert n > 0 and (not EXACT or s.text[0][:n] == w.text[0][:n])

    def free():  # daemons free what it had when its sessions break
        v = [r.running(k) for k in ("prefill", "decode")]
        return all(n == 0 for by_node in v for n in by_node.values())

    wait_for(free, 30, "nothing of the dead conductor runs")


def test_no_worker_left_is_an_error_event_not_done(setting):
    """The last one: nobody is started again."""
    r, c, late = setting.r, setting.c, []

    def ask():
        late.append(c.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, timeout=40 * PATIENCE))

    t = threading.Thread(target=ask)
    workers = r.members("decode") + r.members("prefill")

    def kill():
        for m in workers:
            os.kill(m["pid"], signal.SIGKILL)
        # Sent before anybody has noticed, it would be lost with one dead worker after the other: a 500.
        wait_for(lambda: r.total('baton_sessions_up{kind="worker"}') == 0, 30, "it is noticed")
        t.start()

    s = run_streams(setting.at, [BASE], kill, when=5, slow=c)[0]
    assert s.error is not None and not s.done
    wait_for(lambda: c.request("GET", "/health")[0] == 503, 30, "/health says 503")
    t.join(40 * PATIENCE)
    status, headers, _ = late[0]
    assert status == 503 and int(headers["retry-after"]) >= 1

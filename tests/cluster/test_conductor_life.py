"""The conductor's own life: drain, etcd away, one role left, clients that go away, admission."""
import json
import os
import re
import signal
import socket
import threading
import time

import pytest

from conftest import CALIBRATED, wait_for
from restarts import SLOW_MS
from sanitizer import PATIENCE

PROMPT = "Now is the winter of our discontent made glorious summer by this sun of York; " * 3


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def total(c, name):
    return sum(v for k, v in c.metrics("conductor").items() if k.startswith(name))


def test_sigterm_lets_streams_finish(make_cluster):
    c = make_cluster("--set", f"conductor.drain_ms={int(60 * PATIENCE)}s")
    pid = c.daemon("conductor")["pid"]
    got, done = [], []

    def read():
        for ev in c.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 300, "temperature": 0,
                                               "ignore_eos": True, "logprobs": 0}):
            if ev == "[DONE]":
                done.append(True)
            else:
                got.append(ev)

    def refuses():  # a local cluster has no drain_grace_ms
        try:
            return c.request("GET", "/health")[0] == 503
        except ConnectionError:
            return True

    c.pace(SLOW_MS)
    t = threading.Thread(target=read)
    t.start()
    wait_for(lambda: len(got) > 10, 30, "the stream runs")
    os.kill(pid, signal.SIGTERM)
    wait_for(refuses, 30, "it takes no more")
    with pytest.raises((ConnectionError, socket.timeout, AssertionError)):
        c.complete("x", max_tokens=1)
    assert not done
    c.pace(0)
    t.join(60 * PATIENCE)
    assert done and got[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in got if e["choices"][0]["logprobs"]) == 300
    wait_for(lambda: not alive(pid), 90, "the conductor ends")
    assert "ev=drained" in c.logs()


def test_serving_goes_on_without_etcd(make_cluster):
    c = make_cluster()
    want = c.complete(PROMPT)["choices"][0]["text"]
    os.kill(c.daemon("etcd")["pid"], signal.SIGKILL)
    end = time.monotonic() + 8  # longer than the leases
    while time.monotonic() < end:
        assert c.complete(PROMPT)["choices"][0]["text"] == want
        time.sleep(0.2)
    assert c.request("GET", "/health")[0] == 200
    # A daemon that this machine does not run for two seconds is lost; nothing else happened.
    assert not [why for why in c.replans() if "was lost" not in why]


def test_one_role_left_serves_alone(make_cluster):
    c = make_cluster()
    want = c.complete(PROMPT)["choices"][0]["text"]
    assert total(c, 'baton_plan_total{kind="local"') == 0
    assert total(c, 'baton_plan_total{kind="disaggregated"') == 1
    os.kill(c.daemon("prefill")["pid"], signal.SIGKILL)
    wait_for(lambda: total(c, 'baton_sessions_up{kind="worker"}') == 1, 30, "the session is down")
    assert c.complete(PROMPT)["choices"][0]["text"] == want
    assert total(c, 'baton_plan_total{kind="local",reason="no_prefill_worker"}') == 1
    assert c.request("GET", "/health")[0] == 200
    os.kill(c.daemon("decode")["pid"], signal.SIGKILL)
    wait_for(lambda: c.request("GET", "/health")[0] == 503, 30, "nobody is left")


def test_clients_that_go_away_leave_nothing(cluster):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode()
    aborts = 'vllm:request_success_total{model_name="%s",finished_reason="abort"}' % cluster.model
    before = total(cluster, aborts)
    socks = []
    cluster.pace(SLOW_MS)
    try:
        for i in range(8):
            s = socket.create_connection((cluster.host, cluster.port), 60 * PATIENCE)
            s.sendall(head + body)
            socks.append(s)
        for s in socks:
            got = b""
            while b"data: " not in got:
                got += s.recv(4096) or pytest.fail(f"the stream has ended: {got}")
        for s in socks:
            s.close()
        wait_for(lambda: total(cluster, aborts) == before + 8, 30, "all are noticed")
    finally:
        cluster.pace(0)

    def quiet():
        m = {k: cluster.metrics(k) for k in ("conductor", "prefill", "decode", "kvstore")}
        running = [v for k in ("conductor", "prefill", "decode") for n, v in m[k].items()
                   if re.match("(vllm:num|baton_worker)_requests_(running|waiting)", n)]
        held = [v for i in range(2) for n, v in cluster.metrics("kvstore", i).items()
                if n == "baton_pool_leases" or n == 'baton_pool_slots{state="writing"}']
        return running and held and sum(running) == 0 and sum(held) == 0

    wait_for(quiet, 30, "no request, lease or writing slot is left")


def test_admission(make_cluster, monkeypatch):
    """The first request takes a minute, however fast the machine is and however late the others come."""
    monkeypatch.setenv("BATON_NULL_PACE", "20000,0")
    c = make_cluster("--set", "conductor.max_running=1", "--set", "conductor.max_waiting=1", "--set",
                     "prefill.engine.device=null", "--set", "decode.engine.device=null")
    first = c.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 3000, "temperature": 0,
                                         "ignore_eos": True})
    next(first)
    waiting = {}
    t = threading.Thread(target=lambda: waiting.update(c.complete("Good night", max_tokens=2)))
    t.start()
    wait_for(lambda: total(c, "vllm:num_requests_waiting") == 1, 30, "one waits")
    status, headers, body = c.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert json.loads(body)["error"]["message"]
    first.close()  # its place goes to the one that waits
    t.join(60 * PATIENCE)
    assert waiting["usage"]["completion_tokens"] == 2


def test_overload_is_refused_and_the_rest_served(make_cluster, monkeypatch):
    """Devices that take their time (the null engine, paced), and far more than they can do within the objective."""
    monkeypatch.setenv("BATON_NULL_PACE", "5000,400")
    # Whom the objective refuses is served late as long as that takes less than queue_timeout_ms.
    c = make_cluster(*CALIBRATED, "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null", "--set",
                     "conductor.sched.admission=predict", "--set", f"conductor.queue_timeout_ms={int(1000 * PATIENCE)}ms")
    body = {"prompt": list(range(300, 400)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    want = c.post("/v1/completions", body)["choices"][0]["text"]
    for _ in range(10):  # what a prefill takes is learned
        c.post("/v1/completions", dict(body, cache_salt=str(time.monotonic())))
    out, lock = [], threading.Lock()

    def one(i):
        # One prompt whose blocks nobody has: each has to be computed.
        status, head, data = c.request("POST", "/v1/completions", dict(body, cache_salt=f"s{i}"),
                                       {"x-slo-ttft-ms": str(int(500 * PATIENCE))})
        with lock:
            out.append((status, head.get("retry-after"), json.loads(data)))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(150)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    served = [b["choices"][0]["text"] for s, _, b in out if s == 200]
    refused = [(r, b) for s, r, b in out if s == 429]
    assert len(served) + len(refused) == len(out), [x for x in out if x[0] not in (200, 429)][:3]
    assert served and refused
    assert all(x == want for x in served)
    assert all(int(r) >= 1 and "objective" in b["error"]["message"] for r, b in refused), refused[:3]
    assert total(c, 'baton_requests_rejected_total{reason="overloaded"}') == len(refused)
    wait_for(lambda: total(c, "vllm:num_requests_running") == 0, 30, "nothing is left of it")
    assert c.post("/v1/completions", body)["choices"][0]["text"] == want  # and it is over


def test_a_prompt_that_cannot_be_in_time_is_late(make_cluster):
    """No worker has a first token within a millisecond, however idle: it is served late."""
    body = {"prompt": list(range(300, 400)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    asked = {"x-slo-ttft-ms": "1", "x-baton-plan": "1"}
    options = (*CALIBRATED, "--prefill", "2", "--set", "conductor.sched.policy=baton", "--set", "conductor.sched.admission=priced")
    c = make_cluster(*options)
    want = c.post("/v1/completions", body)["choices"][0]["text"]
    answers = []

    def served():  # while somebody else is held up it is refused: a heartbeat may still tell of the request before
        status, _, data = c.request("POST", "/v1/completions", dict(body, cache_salt=str(time.monotonic())), asked)
        assert status in (200, 429), data
        answers.extend([json.loads(data)] if status == 200 else [])
        return len(answers) == 4
    wait_for(served, 60, "four are served late")
    assert all(a["choices"][0]["text"] == want and a["plan"]["reason"] == "background" for a in answers), answers


def test_a_late_prompt_gives_way(make_cluster, monkeypatch):
    """Five seconds of prefill cannot be in time under one second and are computed behind those that can."""
    monkeypatch.setenv("BATON_NULL_PACE", "5000,1000")
    sets = ["conductor.sched.policy=baton", "conductor.sched.admission=priced",
            "prefill.engine.device=null", "decode.engine.device=null", "prefill.engine.max_rows=256"]
    c = make_cluster(*CALIBRATED, *(x for s in sets for x in ("--set", s)))

    def ask(n, salt, **headers):
        body = {"prompt": [(k * 7) % 1700 + 300 for k in range(n)], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        start = time.monotonic()
        status, _, data = c.request("POST", "/v1/completions", body, {"x-baton-plan": "1", **headers})
        return status, json.loads(data), time.monotonic() - start
    for i in range(6):  # what prefills take is learned
        assert ask(100, f"warm{i}")[0] == 200
    late, t = [], threading.Thread(target=lambda: late.append(ask(5000, "late", **{"x-slo-ttft-ms": "1000"})))
    t.start()
    wait_for(lambda: total(c, 'baton_plan_total{kind="disaggregated",reason="background"}') > 0, 30, "the late one is planned")
    took = []
    for i in range(4):
        status, answer, s = ask(100, f"short{i}", **{"x-slo-ttft-ms": str(int(3000 * PATIENCE))})
        assert status == 200 and not late, (status, answer["plan"], s, took)
        took.append(s)
    t.join(60 * PATIENCE)
    assert late[0][0] == 200 and late[0][1]["plan"]["reason"] == "background", late
    assert late[0][2] > max(took), (late, took)


def test_packed_rows_leave_decode_workers_to_prompts(make_cluster, monkeypatch):
    """Rows go to few decode workers; the others compute prompts as prefill workers do and hand them over, with the same tokens."""
    monkeypatch.setenv("BATON_NULL_PACE", "40000,400")  # of a step of 60 ms the base is most
    sets = ["conductor.sched.policy=baton", "conductor.sched.tbt_objective_ms=80ms", "conductor.sched.admission=none", "prefill.engine.device=null", "decode.engine.device=null"]
    c = make_cluster(*CALIBRATED, "--prefill", "1", "--decode", "3", *(x for s in sets for x in ("--set", s)))

    def ask(i, **more):
        prompt = [(i * 31 + k * (i + 3)) % 1700 + 300 for k in range(200)]
        return c.post("/v1/completions", {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more})

    def text(r):
        return r["choices"][0]["text"]
    want = [text(ask(i, cache_salt="one by one")) for i in range(8)]

    def spare():
        got = {}
        threads = [threading.Thread(target=lambda i=i: got.update({i: text(ask(i, cache_salt=str(time.monotonic())))})) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60 * PATIENCE)
        assert [got.get(i) for i in range(8)] == want
        return total(c, 'baton_plan_total{kind="disaggregated",reason="spare"}') > 0
    wait_for(spare, 120, "a decode worker without rows has computed a prompt for another")


def test_cache_salts_keep_caches_apart(make_cluster, tmp_path):
    secret = tmp_path / "salt"
    secret.write_text("a cluster's secret, long enough for kvstores\n")
    secret.chmod(0o640)
    c = make_cluster("--set", f"all.kv.salt_file={secret}")  # all daemons agree on it, or none joins

    def ask(salt):
        r = c.complete(PROMPT, max_tokens=8, **({"cache_salt": salt} if salt else {}))
        return r["usage"]["prompt_tokens_details"]["cached_tokens"], r["choices"][0]["text"]

    cold, want = ask("alice")
    assert cold == 0
    # Sealing goes on behind the answer: a repeat hits soon, not at once.
    wait_for(lambda: ask("alice")[0] > 0, 30, "alice's own blocks are hit")
    for other in ("bob", None):
        assert ask(other) == (0, want)
        wait_for(lambda: ask(other)[0] > 0, 30, "the same salt hits")
    assert ask("alice")[1] == want


def test_request_timeout(make_cluster):
    c = make_cluster("--set", f"conductor.request_timeout_ms={int(4 * PATIENCE)}s")
    body = {"prompt": PROMPT, "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
    c.pace(SLOW_MS)
    start = time.monotonic()
    events = list(c.stream("/v1/completions", body))
    assert time.monotonic() - start > 3.9 * PATIENCE
    assert len(events) > 2 and "[DONE]" not in events and "error" in events[-1]
    status, _, answer = c.request("POST", "/v1/completions", body)
    assert status == 504 and "time limit" in json.loads(answer)["error"]["message"]
    c.pace(0)
    assert c.complete("short", 3)["usage"]["completion_tokens"] == 3


def test_echo_with_prompt_logprobs_reads_no_cache(cluster):
    """The prompt's logprobs do not depend on what is cached, and are those of generated tokens."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    plain = cluster.post("/v1/completions", body)["choices"][0]
    warm = cluster.post("/v1/completions", dict(body, echo=True))
    echo = warm["choices"][0]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert echo["text"] == PROMPT + plain["text"]
    n = warm["usage"]["prompt_tokens"]
    lps = echo["logprobs"]["token_logprobs"]
    assert lps[0] is None and len(lps) == n + 24 and all(x is not None and x <= 0 for x in lps[1:])
    # What was generated, given as a prompt: the same tokens get the same logprobs.
    ids = cluster.post("/tokenize", {"prompt": PROMPT})["tokens"]
    out = cluster.post("/v1/completions", dict(body, return_tokens_as_token_ids=True))
    made = [int(t.split(":")[1]) for t in out["choices"][0]["logprobs"]["tokens"]]
    only = cluster.post("/v1/completions", dict(body, prompt=ids + made, max_tokens=0, echo=True))
    got = only["choices"][0]["logprobs"]["token_logprobs"]
    assert only["usage"]["completion_tokens"] == 0 and len(got) == len(ids) + 24
    for a, b in zip(got[1:], lps[1:]):
        assert abs(a - b) < 1e-3

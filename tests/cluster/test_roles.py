"""Roles of running workers: changed by command under load without a failed request or another token; refused where the
cluster would lose something; kept by etcd when conductor and worker die."""
import json
import os
import signal
import threading
import time

import pytest

from conftest import CALIBRATED, Cluster, scrape, stop_all, wait_for
from restarts import Restarts
from sanitizer import PATIENCE
from test_conductor_ctl import ctl

PROMPT = "Once more unto the breach, dear friends, once more; or close the wall up with our English dead. "


def addr(c):
    with open(os.path.join(c.state_dir, "conductor.addr")) as f:
        return f.read().strip()


def role(c, worker, what):
    rc, out, err = ctl("--addr", addr(c), "role", worker, what, "-o", "json")
    assert rc == 0, err
    return json.loads(out)


def node(c, name):
    rc, out, err = ctl("--addr", addr(c), "nodes", "-o", "json")
    assert rc == 0, err
    return next(n for n in json.loads(out) if n["name"] == name)


def settled(c, name, what):
    """The conductor plans with the worker's new role."""
    wait_for(lambda: (lambda n: n["role"] == what and n["next_role"] is None)(node(c, name)), 180, f"{name} is {what}")


@pytest.fixture(scope="module")
def four():
    """Shared by tests that leave all roles as they were; test_what_is_refused, the last of them, does not. Every worker has its
    turn: one that was slow once, by what it was measured at, would not show its new role otherwise."""
    made = [Cluster("--prefill", "2", "--decode", "2", "--set", "conductor.sched.role_move_ms=1s", "--set",
                    "conductor.sched.policy=round-robin")]
    yield made[0]
    stop_all(made)


def names(c, kind):
    rc, out, _ = ctl("--addr", addr(c), "nodes", "-o", "json")
    assert rc == 0
    return sorted(n["name"] for n in json.loads(out) if n["kind"] == kind)


def sampled(c, worker_name, what):
    """A counter of the worker with this name."""
    m = scrape(node(c, worker_name)["http"])
    return sum(v for k, v in m.items() if k.startswith(what))


def failed_plans(c):
    """Why requests were planned again, other than for a daemon that this machine did not run for two seconds: it is lost."""
    return [why for why in c.replans() if "was lost" not in why]


def test_under_load_no_request_fails_and_no_token_differs(four):
    c = four
    pids = {d["pid"] for d in c.status()}
    prompts = [PROMPT * 2 + str(i) for i in range(6)]
    want = {p: c.complete(p, 40, ignore_eos=True)["choices"][0]["text"] for p in prompts}
    stop, wrong, served = threading.Event(), [], [0]

    def client(i):
        while not stop.is_set():
            p = prompts[(i + served[0]) % len(prompts)]
            try:
                text = "".join(e["choices"][0]["text"] for e in c.stream("/v1/completions", {
                    "prompt": p, "max_tokens": 40, "temperature": 0, "ignore_eos": True})
                    if e != "[DONE]" and e["choices"])
                if text != want[p]:
                    wrong.append((p, text))
            except Exception as e:  # an error, a broken stream, a refusal
                wrong.append((p, repr(e)))
            served[0] += 1

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    c.pace(5)  # the load leaves CPU to others
    for t in threads:
        t.start()
    try:
        prefill, decode = names(c, "prefill"), names(c, "decode")

        def serve(n):
            before = served[0]
            wait_for(lambda: served[0] >= before + n or wrong, 300, "requests are served")

        serve(4)
        for name, what in ((decode[1], "prefill"), (decode[1], "both"), (prefill[0], "decode"), (decode[1], "own"),
                           (prefill[0], "own")):
            r = role(c, name, what)
            assert r["changed"] and r["worker"] == name
            settled(c, name, {"own": name.split("-")[0]}.get(what, what))
            serve(6)
            if what in ("prefill", "decode"):
                # It does that work now: what the conductor plans arrives there.
                kind = "baton_worker_prompt_tokens_total" if what == "prefill" else "baton_worker_generation_tokens_total"
                before = sampled(c, name, kind)

                def works():  # with prompts that nobody has cached: nothing draws them elsewhere
                    c.complete(f"{time.monotonic()} {PROMPT}", 2)
                    return sampled(c, name, kind) > before or wrong
                wait_for(works, 180, f"{name} works as {what}")
    finally:
        stop.set()
        for t in threads:
            t.join(120 * PATIENCE)
        c.pace(0)
    assert not wrong, wrong[:3]
    assert {d["pid"] for d in c.status()} == pids  # everybody still lives
    assert not failed_plans(c), failed_plans(c)


def test_a_long_answer_moves_behind_its_tokens(make_cluster):
    """7,000 tokens take two minutes at least, however fast the machine is; what comes once the worker is left is the same as
    elsewhere, and then the client goes."""
    c = make_cluster("--prefill", "1", "--decode", "2", "--set", "conductor.sched.role_move_ms=0", "--set",
                     "prefill.engine.device=null", "--set", "decode.engine.device=null")
    body = {"prompt": PROMPT, "max_tokens": 7000, "temperature": 0, "ignore_eos": True}
    got, bad, moved = [], [], []

    def read():
        stream = c.stream("/v1/completions", body)
        for e in stream:
            if e == "[DONE]" or "error" in e:
                bad.append(str(e))
            elif e["choices"]:
                got.append(e["choices"][0]["text"])
            if bad or moved and len(got) > moved[0] + 50:
                break
        stream.close()

    c.pace(20)
    t = threading.Thread(target=read)
    t.start()
    wait_for(lambda: len(got) > 10 or bad, 30, "it streams")
    rc, out, _ = ctl("--addr", addr(c), "requests", "-o", "json")
    assert rc == 0
    at = json.loads(out)[0]["decode"]
    r = role(c, at, "prefill")
    assert r["requests"] >= 1
    settled(c, at, "prefill")
    assert not bad, "it has left the worker, not ended there"
    m = c.metrics("conductor")
    assert m["baton_requests_moved_total"] >= 1
    assert not failed_plans(c), failed_plans(c)
    moved.append(len(got))
    t.join(60 * PATIENCE)
    c.pace(0)
    assert not t.is_alive() and not bad, bad
    text, want, n = "".join(got), "", len(got)
    while len(want) < len(text) and n < 7000:  # an event has one token or, from a busy worker, several
        n = min(7000, 2 * n)
        want = c.post("/v1/completions", {**body, "max_tokens": n})["choices"][0]["text"]
    assert len(text) > 50 and want.startswith(text), text[-100:]


def test_two_commands_at_once_cannot_take_the_last_two(four):
    c = four
    for _ in range(3):
        out = {}
        threads = [threading.Thread(target=lambda n=n: out.update({n: ctl("--addr", addr(c), "role", n, "prefill")}))
                   for n in names(c, "decode")]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120 * PATIENCE)
        assert sorted(rc for rc, _, _ in out.values()) == [0, 1], out
        assert any("is the last worker for decode" in err for _, _, err in out.values()), out
        for n in names(c, "decode"):
            role(c, n, "own")
            settled(c, n, "decode")


def test_two_drains_at_once_cannot_take_both_nodes(four):
    c = four
    nodes = sorted({node(c, n)["node"] for n in names(c, "decode")})
    assert len(nodes) == 2
    out = {}
    try:
        threads = [threading.Thread(target=lambda n=n: out.update({n: ctl("--addr", addr(c), "drain", n)})) for n in nodes]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120 * PATIENCE)
        assert sorted(rc for rc, _, _ in out.values()) == [0, 1], out
        assert any("new requests would get 503" in err for _, _, err in out.values()), out
    finally:
        for n in nodes:
            assert ctl("--addr", addr(c), "undrain", n)[0] == 0


def test_what_is_refused(four):
    c = four
    prefill, decode = names(c, "prefill"), names(c, "decode")

    def refused(*args, code=1):
        rc, out, err = ctl("--addr", addr(c), "role", *args)
        assert rc == code and out == "", (rc, out)
        return err

    assert "there are: " in refused("decode-n9-0", "prefill") and decode[0] in refused("nobody", "prefill")
    assert "is not a role" in refused(decode[0], "encode", code=2)
    assert "needs a second argument: ROLE" in refused(decode[0], code=2)
    role(c, decode[0], "prefill")
    assert f"{decode[1]} is the last worker for decode" in refused(decode[1], "prefill")
    rc, out, err = ctl("--addr", addr(c), "role", decode[1], "prefill", "--force")
    assert rc == 0, err
    settled(c, decode[1], "prefill")
    assert c.complete("And then", 4)["usage"]["completion_tokens"] == 4  # one worker does both
    role(c, decode[1], "both")
    role(c, prefill[0], "decode")
    settled(c, prefill[0], "decode")
    settled(c, decode[1], "both")
    role(c, decode[1], "prefill")  # there is another one by now
    settled(c, decode[1], "prefill")
    assert c.complete("And then", 4)["usage"]["completion_tokens"] == 4
    # A node that is being emptied gets no new work.
    n = node(c, prefill[1])["node"]
    assert ctl("--addr", addr(c), "drain", n)[0] == 0
    assert f"batonctl undrain {n}" in refused(prefill[1], "both")
    assert ctl("--addr", addr(c), "undrain", n)[0] == 0
    r = role(c, prefill[1], "own")
    assert not r["changed"]


@pytest.fixture
def restarts():
    made = [Restarts("--prefill", "2", "--decode", "1")]
    yield made[0]
    made[0].stop()


def test_the_role_outlives_conductor_and_worker(restarts):
    c = restarts.c
    name = names(c, "prefill")[1]
    m = node(c, name)
    conductor = restarts.members("conductor")[0]
    assert role(c, name, "decode")["changed"]
    os.kill(conductor["pid"], signal.SIGKILL)

    def offers(what):
        return scrape(m["http"])[f'baton_worker_role{{role="{what}"}}'] == 1

    wait_for(lambda: offers("decode") and not offers("prefill"), 30, "it follows etcd, not the conductor")
    argv, env, cwd = restarts.args["conductor", conductor["name"]]
    # Ports of its own: the old ones may have been given to another process meanwhile.
    again = restarts.spawn([*argv, "--set", "rpc.listen=127.0.0.1:0", "--set", "conductor.http.listen=127.0.0.1:0"], env, cwd,
                           "conductor.log")
    old = addr(c)
    at = wait_for(lambda: (lambda d: d["grpc"] != old and d)(c.daemon("conductor")), 30, "a conductor is ready again")
    restarts.addr, c.host, c.port = at["grpc"], at["http"].split(":")[0], int(at["http"].split(":")[1])
    with open(os.path.join(c.state_dir, "conductor.addr"), "w") as f:
        f.write(restarts.addr + "\n")
    wait_for(lambda: ctl("--addr", addr(c), "status")[0] == 0, 30, "a conductor answers again")
    wait_for(lambda: name in names(c, "prefill") and node(c, name)["session_up"], 30, "it has met the worker")
    assert node(c, name)["role"] == "decode"
    m = node(c, name)
    os.kill(m["pid"], signal.SIGKILL)
    restarts.start_again(m)
    settled(c, name, "decode")
    assert again.poll() is None
    r = role(c, name, "own")
    assert r["before"] == "decode" and r["role"] == "prefill"
    settled(c, name, "prefill")


def test_by_load(make_cluster):
    """Decode is short of rows for two windows while prefill idles: one prefill worker changes; requests do not notice."""
    c = make_cluster(*CALIBRATED, "--prefill", "2", "--decode", "1", "--set", "conductor.sched.roles=auto", "--set",
                     "conductor.sched.roles_window_ms=1s", "--set", "decode.engine.max_slots=4", "--set",
                     "prefill.engine.max_slots=4")
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    want = c.post("/v1/completions", body)["choices"][0]["text"]
    stop, wrong = threading.Event(), []

    def client():
        while not stop.is_set():
            try:
                text = c.post("/v1/completions", body)["choices"][0]["text"]
                if text != want:
                    wrong.append(text)
            except Exception as e:
                wrong.append(repr(e))

    threads = [threading.Thread(target=client) for _ in range(8)]
    for t in threads:
        t.start()
    try:
        wait_for(lambda: c.metrics("conductor")["baton_role_policy_owner"] == 1 or wrong, 30, "it owns the job")
        wait_for(lambda: "decode" in [node(c, n)["role"] for n in names(c, "prefill")] or wrong, 90,
                 "a prefill worker decodes")
    finally:
        stop.set()
        for t in threads:
            t.join(120 * PATIENCE)
    assert not wrong, wrong[:3]
    m = c.metrics("conductor")
    assert m["baton_role_policy_changes_total"] == 1
    # What an operator says then stands.
    changed = next(n for n in names(c, "prefill") if node(c, n)["role"] == "decode")
    role(c, changed, "prefill")
    settled(c, changed, "prefill")

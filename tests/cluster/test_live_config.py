"""The best configuration in simulation, live (docs/SCHEDULING.md, "Say what you want"): policy baton with prompts on decode workers,
admission priced, late prompts. Whatever the plan, the tokens are those of one worker alone; nothing is lost with a worker.

The engine is `null`, paced as a device: its tokens stand for the whole history, on any machine."""
import json
import os
import random
import signal
import threading

from conftest import Cluster, stop_all, wait_for
from leftovers import usage_of
from test_conductor_ctl import ctl
from test_conductors import Conductor

TBT_MS = 2000
NULL = [x for kind in ("prefill", "decode") for key in ("device=null", "max_rows=512") for x in ("--set", f"{kind}.engine.{key}")]
LIVE = [x for key, value in (
    ("conductor.sched.policy", "baton"), ("conductor.sched.admission", "priced"),
    ("conductor.sched.ttft_objective_ms", 60000), ("conductor.sched.tbt_objective_ms", TBT_MS)) for x in ("--set", f"{key}={value}")]
REASONS = {"apart", "on a decode worker", "background", "fetched"}


def bodies():
    """Half of them begin like others; greedy and sampled, of several choices, with logprobs of the prompt."""
    r = random.Random(3)

    def ids(n):
        return [r.randrange(300, 1500) for _ in range(n)]

    heads, out = [ids(320), ids(320)], []
    for i in range(24):
        prompt = (heads[i // 2 % 2] if i % 2 else []) + ids(r.choice([20, 150, 300]))
        out.append({"prompt": prompt, "max_tokens": r.choice([1, 5, 30]), "temperature": 0, "ignore_eos": True, "logprobs": 0,
                    "return_tokens_as_token_ids": True})
    out[0].update(n=3, temperature=1, seed=5)
    out[5].update(echo=True)
    out[10].update(echo=True, max_tokens=0)
    out[15].update(temperature=1, seed=7)
    return out


def essence(answer):
    choices = [(c["text"], c["finish_reason"], c["logprobs"]["tokens"]) for c in answer["choices"]]
    return choices, answer["usage"]["completion_tokens"]


class Load:
    def __init__(self, c, asked, want):
        self.c, self.asked, self.want = c, asked, want
        self.wrong, self.kinds = [], set()

    def one(self, i, headers):
        status, _, data = self.c.request("POST", "/v1/completions", self.asked[i], dict(headers, **{"x-baton-plan": "1"}))
        answer = json.loads(data)
        if status == 429 and "x-slo-ttft-ms" in headers:
            return  # its own objective, and too many others are there
        if status != 200 or essence(answer) != self.want[i]:
            self.wrong.append((i, status, answer))
            return
        plan = answer["plan"]
        self.kinds.add("on a decode worker" if plan["prefill"].startswith("decode-") else plan["reason"])
        self.kinds |= ({"fetched"} if plan["fetch_tokens"] else set()) | ({plan["reason"]} & REASONS)

    def burst(self, meanwhile=None):
        """All at once, behind one that can only be late, in four classes of priority."""
        self.one(0, {"x-slo-ttft-ms": "1"})
        threads = [threading.Thread(target=self.one, args=(i, {"x-priority": str(i % 4)})) for i in range(len(self.asked))]
        for t in threads:
            t.start()
        if meanwhile:
            meanwhile()
        for t in threads:
            t.join()
        assert not self.wrong, self.wrong[:2]


def test_the_same_tokens_whatever_the_plan(monkeypatch):
    asked, made = bodies(), []
    try:
        made.append(Cluster("--nodes", "1", *NULL))
        os.kill(made[0].daemon("prefill")["pid"], signal.SIGKILL)
        wait_for(lambda: made[0].metrics("conductor")['baton_sessions_up{kind="worker"}'] == 1, 30, "one worker for both is left")
        want = [essence(made[0].post("/v1/completions", b)) for b in asked]
        monkeypatch.setenv("BATON_NULL_PACE", "1000,50")
        made.append(Cluster("--prefill", "2", "--decode", "2", *NULL, *LIVE))
        c = made[1]
        load = Load(c, asked, want)

        def all_seen():
            load.burst()
            return load.kinds >= REASONS

        wait_for(all_seen, 120, "plans of each kind")
        # A daemon that this machine does not run for two seconds is lost; nothing else happened.
        assert not [why for why in c.replans() if "was lost" not in why]
        wait_for(lambda: not any(u.get("leases", 0) + u.get("writing", 0) for u in usage_of(c).values()), 30, "all is given back")
        pid = c.daemon("decode")["pid"]
        load.burst(lambda: os.kill(pid, signal.SIGKILL))
        load.burst()
        m = c.metrics("conductor")
        assert sum(v for k, v in m.items() if k.startswith('baton_requests_rejected_total{reason="failed"')) == 0
    finally:
        stop_all(made)


def ask(c, *command):
    with open(os.path.join(c.state_dir, "conductor.addr")) as f:
        rc, out, err = ctl("--addr", f.read().strip(), *command)
    assert rc == 0, err
    return out


def nodes(c, kind):
    return {n["name"]: n for n in json.loads(ask(c, "nodes", "-o", "json")) if n["kind"] == kind}


def in_force(c, kind="decode"):
    """What the conductor knows of its workers' steps with prompts beside rows."""
    return [n["load"] and (round(n["load"]["mixed"]["step_ms"], 2), round(n["load"]["mixed"]["gap_ms"], 2)) for n in nodes(c, kind).values()]


def reload(conductor, text):
    """conductor: its pid and configuration file."""
    pid, conf = conductor
    with open(conf) as f:
        kept = [x for x in f.read().splitlines() if not x.startswith("sched:")]
    with open(conf, "w") as f:
        f.write("\n".join([*kept, f"sched: {{{text}}}"]) + "\n")
    os.kill(pid, signal.SIGHUP)


def test_an_objective_is_all_that_is_said():
    """Workers take the shortest steps that their conductors' objectives ask for, at the start, when these change, when a worker
    or a conductor comes anew, and in another role; the conductors know what is in force."""
    options = [x for kind in ("prefill", "decode") for x in ("--set", f"{kind}.engine.device=null")]
    made = []
    try:
        c = Cluster(*options, "--decode", "2")
        made.append(c)
        first = (c.daemon("conductor")["pid"], os.path.join(c.state_dir, "conf", "conductor.yaml"))
        assert in_force(c) == [(0, 0)] * 2  # no objective
        reload(first, "policy: baton, admission: priced, ttft_objective_ms: 60s, tbt_objective_ms: 400")
        wait_for(lambda: in_force(c) == [(300, 380)] * 2 and in_force(c, "prefill") == [(300, 380)], 30, "all workers are told")
        assert "baton, priced; objectives: first token 60000 ms, between tokens 400 ms" in ask(c, "status")
        other = Conductor(c, "other")
        made.append(other)
        wait_for(other.serving, 30, "the second conductor serves")
        reload((other.p.pid, other.conf), "policy: baton, tbt_objective_ms: 200")
        wait_for(lambda: in_force(c) == [(150, 190)] * 2, 30, "the shorter objective counts")

        def told():
            with open(c.daemon("conductor")["log"], errors="replace") as f:
                return f.read().count("ev=mixed_steps_short")
        wait_for(lambda: told() >= 2, 30, "the other one says that workers' steps are shorter than it asked for")
        other.kill()
        wait_for(lambda: in_force(c) == [(300, 380)] * 2, 30, "who is gone says nothing")
        other.start()
        wait_for(lambda: in_force(c) == [(150, 190)] * 2, 30, "it is told by who comes anew")
        other.stop()
        name = sorted(nodes(c, "prefill"))[0]
        ask(c, "role", name, "both")
        wait_for(lambda: nodes(c, "prefill")[name]["role"] == "both" and in_force(c, "prefill") == [(300, 380)], 30, "another role")
        reload(first, "policy: kvcache, tbt_objective_ms: 400")
        wait_for(lambda: in_force(c) == [(0, 0)] * 2, 30, "no prompts beside rows")
        assert c.complete("ROMEO:\n", 4)["usage"]["completion_tokens"] == 4
    finally:
        stop_all(made)

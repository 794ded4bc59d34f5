"""The best configuration in simulation, live (docs/SCHEDULING.md, "Turn it on"): policy baton with prompts on decode workers,
admission priced, late prompts. Whatever the plan, the tokens are those of one worker alone; nothing is lost with a worker.

The engine is `null`, paced as a device: its tokens stand for the whole history, on any machine."""
import json
import os
import random
import signal
import threading

from conftest import Cluster, stop_all, wait_for
from leftovers import usage_of

TBT_MS = 100
NULL = [x for kind in ("prefill", "decode") for key in ("device=null", "max_rows=512") for x in ("--set", f"{kind}.engine.{key}")]
LIVE = [x for key, value in (
    ("conductor.sched.policy", "baton"), ("conductor.sched.admission", "priced"), ("conductor.sched.background_share", 0.5),
    ("conductor.sched.ttft_objective_ms", 60000), ("conductor.sched.tbt_objective_ms", 20 * TBT_MS),
    ("conductor.sched.mixed_step_ms", 0.75 * TBT_MS), ("decode.engine.mixed_step_ms", 0.75 * TBT_MS),
    ("conductor.sched.mixed_gap_ms", 0.95 * TBT_MS), ("decode.engine.mixed_gap_ms", 0.95 * TBT_MS))
    for x in ("--set", f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}")]
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
        self.wrong, self.kinds, self.replans = [], set(), 0

    def one(self, i, headers):
        status, _, data = self.c.request("POST", "/v1/completions", self.asked[i], dict(headers, **{"x-baton-plan": "1"}))
        answer = json.loads(data)
        if status == 429 and "x-slo-ttft-ms" in headers:
            return  # its own objective, and too many others are there
        if status != 200 or essence(answer) != self.want[i]:
            self.wrong.append((i, status, answer))
            return
        plan = answer["plan"]
        self.replans += plan["replans"]
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
        # One worker for both, at once: a cluster without a role waits before it serves.
        made.append(Cluster("--nodes", "1", *NULL, "--set", "conductor.sched.local_prefill_tokens=100000"))
        want = [essence(made[0].post("/v1/completions", b)) for b in asked]
        assert made[0].metrics("prefill")["baton_worker_steps_total"] == 0
        monkeypatch.setenv("BATON_NULL_PACE", "1000,50")
        made.append(Cluster("--prefill", "2", "--decode", "2", *NULL, *LIVE))
        c = made[1]
        load = Load(c, asked, want)

        def all_seen():
            load.burst()
            return load.kinds >= REASONS

        wait_for(all_seen, 20, "plans of each kind")
        assert load.replans == 0
        wait_for(lambda: not any(u.get("leases", 0) + u.get("writing", 0) for u in usage_of(c).values()), 10, "all is given back")
        pid = c.daemon("decode")["pid"]
        load.burst(lambda: os.kill(pid, signal.SIGKILL))
        load.burst()
        m = c.metrics("conductor")
        assert sum(v for k, v in m.items() if k.startswith('baton_requests_rejected_total{reason="failed"')) == 0
    finally:
        stop_all(made)

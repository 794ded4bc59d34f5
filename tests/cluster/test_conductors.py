"""Three conductors at once, no leader: two of them are killed in turns under load. Nobody who comes back to another one
is refused for good, and streams on the conductor that lives are as if nothing had happened."""
import http.client
import json
import os
import random
import subprocess
import threading
import time

from conftest import BUILD, CALIBRATED, CTL, Cluster, wait_for
from local_cluster import free_port
from sanitizer import PATIENCE
from test_conductor_ctl import ctl

KILLS = 4
STEP_MS = 10  # longer, so that clients that send one request behind another leave time to others on this machine
WORDS = "Speak, citizens, of corn and of kings and of the tempest to come; "


class Conductor:
    """A further one of a cluster, as a service manager would run it: same port after every start."""

    def __init__(self, c, name, grace_ms=0):
        self.log = open(os.path.join(c.state_dir, "logs", name + ".log"), "ab")
        self.conf = os.path.join(c.state_dir, "conf", name + ".yaml")
        self.port = free_port()
        with open(os.path.join(c.state_dir, "conf", "conductor.yaml")) as f:
            text = [x for x in f.read().splitlines() if not x.startswith(("conductor:", "run_dir:"))]
        run = os.path.join(c.state_dir, "run-" + name)
        os.makedirs(run)
        text += [f"run_dir: '{run}'",
                 f"conductor: {{name: {name}, drain_grace_ms: {int(grace_ms)}, http: {{listen: '127.0.0.1:{self.port}'}}}}"]
        with open(self.conf, "w") as f:
            f.write("\n".join(text) + "\n")
        self.p = None
        self.start()

    def start(self):
        self.p = subprocess.Popen([os.path.join(BUILD, "bin", "baton-conductor"), "--config", self.conf],
                                  stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def health(self):
        """The status of /health, 0: no answer."""
        k = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60 * PATIENCE)
        try:
            k.request("GET", "/health")
            return k.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            k.close()

    def serving(self):
        assert self.p.poll() is None, "the conductor has ended by itself"
        return self.health() == 200

    def kill(self):
        self.p.kill()
        self.p.wait()

    def stop(self):
        if self.p.poll() is None:
            self.p.terminate()
            self.p.wait(40 * PATIENCE)
        self.log.close()


def stream(port, prompt, tokens):
    """Text of a streamed greedy answer. OSError, HTTPException: the connection broke; AssertionError: told otherwise."""
    k = http.client.HTTPConnection("127.0.0.1", port, timeout=60 * PATIENCE)
    try:
        k.request("POST", "/v1/completions", json.dumps({
            "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}),
            {"Content-Type": "application/json"})
        r = k.getresponse()
        if r.status in (429, 503):
            raise OSError(f"{r.status}")
        assert r.status == 200, (r.status, r.read())
        text, done = "", False
        for line in r:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                e = json.loads(line[6:])
                assert "error" not in e, e
                text += e["choices"][0]["text"] if e["choices"] else ""
        if not done:
            raise OSError("the stream broke")
        return text
    finally:
        k.close()


def test_one_of_three_is_killed_again_and_again():
    c = Cluster()
    others = []
    stop = threading.Event()
    try:
        others = [Conductor(c, name) for name in ("second", "third")]
        for o in others:
            wait_for(o.serving, 30, "a further conductor serves")
        ports = [c.port] + [o.port for o in others]
        prompts = [WORDS + str(i) for i in range(4)]
        want = {p: stream(c.port, p, 24) for p in prompts}
        steady_want = stream(c.port, WORDS, 160)
        wrong, retried, served, steady = [], [0], [0], [0]

        def client(seed):
            r = random.Random(seed)
            while not stop.is_set():
                prompt = r.choice(prompts)
                deadline = time.monotonic() + 60 * PATIENCE
                while True:
                    try:
                        text = stream(r.choice(ports), prompt, 24)
                        if text != want[prompt]:
                            wrong.append((prompt, text))
                        served[0] += 1
                        break
                    except (OSError, http.client.HTTPException):
                        retried[0] += 1
                        if time.monotonic() > deadline:
                            wrong.append((prompt, "nobody served it"))
                            break
                        time.sleep(0.02)
                    except AssertionError as e:
                        wrong.append((prompt, str(e)))
                        break

        def on_the_first():
            while not stop.is_set():
                try:
                    text = stream(c.port, WORDS, 160)
                    if text != steady_want:
                        wrong.append(("steady", text))
                    steady[0] += 1
                except Exception as e:  # nothing at all may happen to these
                    wrong.append(("steady", repr(e)))

        threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        threads.append(threading.Thread(target=on_the_first))
        c.pace(STEP_MS)
        for t in threads:
            t.start()
        for i in range(KILLS):
            before = served[0]
            wait_for(lambda: served[0] >= before + 10 or wrong, 60, "requests are served")
            o = others[i % 2]
            o.kill()
            during, missed = served[0], retried[0]
            wait_for(lambda: served[0] >= during + 5 and retried[0] > missed or wrong, 60, "the others go on serving")
            o.start()
            wait_for(o.serving, 60, "it serves again")
        wait_for(lambda: steady[0] > 0 or wrong, 60, "a stream of the first one has ended")
        stop.set()
        for t in threads:
            t.join(120 * PATIENCE)
            assert not t.is_alive()
        assert not wrong, wrong[:3]
        # What the killed ones had is gone everywhere: workers cancel what a broken session has sent.
        wait_for(lambda: all(n["running"] + n["waiting"] == 0 for n in loads(c)), 30, "workers are empty")
    finally:
        stop.set()
        for o in others:
            o.stop()
        c.stop()


class Balancer:
    """Sends each request to the next conductor whose /health said 200 when it was asked last. Clients keep their
    connections as long as the server lets them and that conductor is in rotation."""

    def __init__(self, conductors):
        self.conductors, self.healthy = conductors, {o.port: True for o in conductors}
        self.stop, self.lock, self.turn = threading.Event(), threading.Lock(), 0
        self.served, self.failed = {o.port: 0 for o in conductors}, []
        self.threads = [threading.Thread(target=self.check)]
        self.threads += [threading.Thread(target=self.client) for _ in range(4)]
        for t in self.threads:
            t.start()

    def check(self):
        while not self.stop.wait(0.05):
            for o in self.conductors:
                self.healthy[o.port] = o.health() == 200

    def choose(self):
        with self.lock:
            ports = [p for p, ok in self.healthy.items() if ok]
            self.turn += 1
            return ports[self.turn % len(ports)] if ports else None

    def client(self):
        kept = {}
        while not self.stop.is_set():
            port = self.choose()
            for p in [p for p in kept if not self.healthy[p]]:
                kept.pop(p).close()
            if port is None:
                self.failed.append("no conductor is in rotation")
                return
            k = kept.pop(port, None) or http.client.HTTPConnection("127.0.0.1", port, timeout=60 * PATIENCE)
            try:
                k.request("POST", "/v1/completions", json.dumps({"prompt": WORDS, "max_tokens": 4}),
                          {"Content-Type": "application/json"})
                r = k.getresponse()
                body = r.read()
                if r.status != 200:
                    self.failed.append((port, r.status, body))
                elif not r.will_close:
                    kept[port] = k
                self.served[port] += 1
            except (OSError, http.client.HTTPException) as e:
                self.failed.append((port, repr(e)))
        for k in kept.values():
            k.close()

    def end(self):
        self.stop.set()
        for t in self.threads:
            t.join(90 * PATIENCE)


def test_rolling_restart_refuses_nobody():
    c = Cluster()
    both, balancer = [], None
    try:
        both = [Conductor(c, name, grace_ms=5000 * PATIENCE) for name in ("second", "third")]
        for o in both:
            wait_for(o.serving, 30, "a conductor serves")
        c.pace(STEP_MS)
        balancer = Balancer(both)
        for o in both:
            before = balancer.served[o.port]
            wait_for(lambda: balancer.served[o.port] >= before + 5 or balancer.failed, 60, "it is in rotation")
            o.p.terminate()
            wait_for(lambda: o.health() == 503, 30, "its end is announced")
            assert stream(o.port, WORDS, 4)  # who has not noticed is served
            wait_for(lambda: o.health() == 0, 30, "its port is closed")
            assert o.p.wait(40 * PATIENCE) == 0
            o.start()
            wait_for(o.serving, 60, "it serves again")
        wait_for(lambda: min(balancer.served.values()) > 10 or balancer.failed, 60, "both have served")
        assert not balancer.failed, balancer.failed[:3]
    finally:
        if balancer:
            balancer.end()
        for o in both:
            o.stop()
        c.stop()
    assert not balancer.failed, balancer.failed[:3]


def test_classes_of_other_conductors(monkeypatch):
    """What the first conductor has queued keeps the second one's requests out by class: a lower one's prompts are no
    reason to refuse a higher one. The engine takes half a second a prompt, and sleeps meanwhile."""
    monkeypatch.setenv("BATON_NULL_PACE", "1000,5000")
    c = Cluster(*CALIBRATED, "--nodes", "1", "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")
    second, done = None, []
    try:
        second = Conductor(c, "second")
        wait_for(second.serving, 30, "a further conductor serves")
        body = {"prompt": list(range(300, 400)), "max_tokens": 1}

        def ask(port, salt, priority, **headers):
            k = http.client.HTTPConnection("127.0.0.1", port, timeout=120 * PATIENCE)
            k.request("POST", "/v1/completions", json.dumps(dict(body, cache_salt=salt, priority=priority)),
                      {"Content-Type": "application/json", **headers})
            r = k.getresponse()
            return r.status, json.loads(r.read())

        for i in range(3):  # both learn what a prefill takes
            assert ask(c.port, f"first{i}", 0)[0] == ask(second.port, f"second{i}", 0)[0] == 200
        threads = [threading.Thread(target=lambda i=i: done.append(ask(c.port, f"low{i}", 5)[0])) for i in range(20)]
        for t in threads:
            t.start()
        addr = conductor_rpc(c, "second")

        def queued():
            out = subprocess.run([CTL, "--addr", addr, "nodes", "-o", "json"],
                                 stdout=subprocess.PIPE, check=True).stdout
            workers = [n for n in json.loads(out) if n["kind"] in ("prefill", "decode") and n["load"]]
            return sum(n["load"]["queued_prefill_tokens"] for n in workers)

        wait_for(lambda: queued() > 1200, 60, "the second conductor hears of the queue")
        objective = {"x-slo-ttft-ms": "4500"}
        status, answer = ask(second.port, "higher", 4, **objective)
        assert status == 200, answer
        assert len(done) < 18, "it went before those that were there"
        for t in threads:
            t.join(120 * PATIENCE)
        assert done == [200] * 20
    finally:
        if second is not None:
            second.stop()
        c.stop()


def conductor_rpc(c, name):
    """Where the admin service of this one listens, as the cluster's first conductor knows it."""
    with open(os.path.join(c.state_dir, "conductor.addr")) as f:
        out = subprocess.run([CTL, "--addr", f.read().strip(), "nodes", "-o", "json"], stdout=subprocess.PIPE, check=True)
    return next(n["rpc"] for n in json.loads(out.stdout) if n["kind"] == "conductor" and n["name"] == name)


def test_two_conductors_cannot_take_the_last_two():
    """Two commands at once, each at another conductor, which still sees the other's workers serving: etcd decides."""
    c, second = Cluster("--prefill", "2", "--decode", "2", "--set", "conductor.sched.role_move_ms=1s"), None

    def workers(addr):
        rc, out, err = ctl("--addr", addr, "nodes", "-o", "json")
        assert rc == 0, err
        return [n for n in json.loads(out) if n["kind"] in ("prefill", "decode")]

    def at_once(*commands):
        out, gate = {}, threading.Barrier(len(commands))

        def one(addr, command):
            gate.wait()
            out[addr] = ctl("--addr", addr, *command)
        threads = [threading.Thread(target=one, args=x) for x in zip(addrs, commands)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(rc for rc, _, _ in out.values()) == [0, 1], out
        return " ".join(err for _, _, err in out.values())

    def as_before():
        for n in nodes:
            assert ctl("--addr", addrs[0], "undrain", n)[0] == 0
        assert ctl("--addr", addrs[0], "role", there[1], "own")[0] == 0
        for a in addrs:
            wait_for(lambda a=a: all(w["session_up"] and w["state"] == "ready" and not w["draining"] and w["role"] == w["kind"] and w["next_role"] is None
                                     for w in workers(a)) and len(workers(a)) == 4, 60, "all serve again")
    try:
        second = Conductor(c, "second")
        wait_for(second.serving, 30, "a further conductor serves")
        with open(os.path.join(c.state_dir, "conductor.addr")) as f:
            addrs = [f.read().strip(), conductor_rpc(c, "second")]
        decodes = {w["node"]: w["name"] for w in workers(addrs[0]) if w["kind"] == "decode"}
        nodes = sorted(decodes)
        there = [decodes[n] for n in nodes]
        assert len(nodes) == 2
        as_before()
        for _ in range(6):
            err = at_once(("drain", nodes[0]), ("drain", nodes[1]))
            assert "would stop the last worker for" in err, err
            as_before()
        for _ in range(3):  # the only other decode worker is to prefill
            err = at_once(("drain", nodes[0]), ("role", there[1], "prefill"))
            assert "would stop the last worker for decode" in err or "is the last worker for decode" in err, err
            as_before()
    finally:
        if second is not None:
            second.stop()
        c.stop()


def loads(c):
    """Running and waiting requests of each worker."""
    out = []
    for kind in ("prefill", "decode"):
        m = c.metrics(kind)
        out.append({w: next(v for k, v in m.items() if k.startswith(f"baton_worker_requests_{w}"))
                    for w in ("running", "waiting")})
    return out

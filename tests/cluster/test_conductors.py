"""Three conductors at once, no leader: two of them are killed in turns under load. Nobody who comes back to another one
is refused for good, and streams on the conductor that lives are as if nothing had happened."""
import http.client
import json
import os
import random
import socket
import subprocess
import threading
import time

from conftest import BUILD, CTL, Cluster, wait_for
from sanitizer import PATIENCE

KILLS = 4
WORDS = "Speak, citizens, of corn and of kings and of the tempest to come; "


class Conductor:
    """A further one of a cluster, as a service manager would run it: same port after every start."""

    def __init__(self, c, name):
        self.log = open(os.path.join(c.state_dir, "logs", name + ".log"), "ab")
        self.conf = os.path.join(c.state_dir, "conf", name + ".yaml")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        with open(os.path.join(c.state_dir, "conf", "conductor.yaml")) as f:
            text = [x for x in f.read().splitlines() if not x.startswith(("conductor:", "run_dir:"))]
        run = os.path.join(c.state_dir, "run-" + name)
        os.makedirs(run)
        text += [f"run_dir: '{run}'",
                 f"conductor: {{name: {name}, http: {{listen: '127.0.0.1:{self.port}'}}}}"]
        with open(self.conf, "w") as f:
            f.write("\n".join(text) + "\n")
        self.p = None
        self.start()

    def start(self):
        self.p = subprocess.Popen([os.path.join(BUILD, "bin", "baton-conductor"), "--config", self.conf],
                                  stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def serving(self):
        assert self.p.poll() is None, "the conductor has ended by itself"
        try:
            k = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            k.request("GET", "/health")
            return k.getresponse().status == 200
        except OSError:
            return False

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
        for t in threads:
            t.start()
        for i in range(KILLS):
            before = served[0]
            wait_for(lambda: served[0] >= before + 10 or wrong, 60, "requests are served")
            o = others[i % 2]
            o.kill()
            during = served[0]
            wait_for(lambda: served[0] >= during + 5 or wrong, 60, "the others go on serving")
            o.start()
            wait_for(o.serving, 60, "it serves again")
        stop.set()
        for t in threads:
            t.join(120 * PATIENCE)
            assert not t.is_alive()
        assert not wrong, wrong[:3]
        assert retried[0] > 0 and steady[0] > 0
        # What the killed ones had is gone everywhere: workers cancel what a broken session has sent.
        wait_for(lambda: all(n["running"] + n["waiting"] == 0 for n in loads(c)), 30, "workers are empty")
    finally:
        stop.set()
        for o in others:
            o.stop()
        c.stop()


def test_classes_of_other_conductors(monkeypatch):
    """What the first conductor has queued keeps the second one's requests out by class: a lower one's prompts are no
    reason to refuse a higher one. The engine takes a second a prompt, and sleeps meanwhile."""
    monkeypatch.setenv("BATON_NULL_PACE", "1000,10000")
    c = Cluster("--nodes", "1", "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")
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

        wait_for(lambda: queued() > 1200, 20, "the second conductor hears of the queue")
        objective = {"x-slo-ttft-ms": "9000"}
        status, answer = ask(second.port, "equal", 5, **objective)
        assert status == 429 and "objective" in answer["error"]["message"], answer
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


def loads(c):
    """Running and waiting requests of each worker."""
    out = []
    for kind in ("prefill", "decode"):
        m = c.metrics(kind)
        out.append({w: next(v for k, v in m.items() if k.startswith(f"vllm:num_requests_{w}"))
                    for w in ("running", "waiting")})
    return out

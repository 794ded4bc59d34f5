"""A small cluster whose daemons run under tests/tools/fail_nth.c: the n-th allocation of one, or its n-th write to a file,
fails, once or from then on, while requests are served. What must hold is in Nth.trial()."""
import http.client
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import tempfile
import threading
import time

from local_cluster import BIN, BUILD, LOCAL, Cluster, free_port, scrape
from restarts import args_of
from sanitizer import PATIENCE

LIB = os.path.join(BUILD, "tests", "tools", "fail_nth.so")
TARGETS = ("conductor", "kvstore", "prefill", "decode")
KINDS = {"memory": 1, "disk": 2}
BACK_S = 60      # a daemon that goes on, or was started again, serves within
ANSWER_S = 60    # no request takes longer
EXACT = "avx512_bf16" in open("/proc/cpuinfo").read()
WRAPPER = """#!/bin/sh
exec env {env} {real} "$@"
"""
# What a daemon says when it ends for want of memory or room.
NAMED = {"memory": ("ev=out_of_memory", "out of memory", "Out of memory", "annot allocate memory"), "disk": ("No space left",)}
# What it may end with. libcrypto 3.0 dereferences NULL where it has no memory for its tables: not ours to mend.
ENDS = (-signal.SIGABRT, -signal.SIGSEGV, 1, 2)


class Control:
    """struct control of fail_nth.c in a process."""

    def __init__(self, folder, pid):
        with open(os.path.join(folder, str(pid)), "r+b") as f:
            self.map = mmap.mmap(f.fileno(), 4096)

    def arm(self, kind, n, on):
        struct.pack_into("<IIQQQ", self.map, 0, 0, int(on), n, 0, 0)
        struct.pack_into("<I", self.map, 0, KINDS[kind])

    def disarm(self):
        struct.pack_into("<I", self.map, 0, 0)

    def failed(self):
        return struct.unpack_from("<Q", self.map, 24)[0]

    def calls(self, kind):
        return struct.unpack_from("<Q", self.map, 32 + 8 * KINDS[kind])[0]


class Daemon:
    def __init__(self, run, kind, pid, log):
        self.run, self.kind, self.log, self.p = run, kind, log, None
        self.argv, self.env, _ = args_of(pid)
        os.kill(pid, signal.SIGKILL)
        self.spawn()

    def spawn(self, **env):
        self.log_from = os.path.getsize(self.log)
        with open(self.log, "ab") as f:
            self.p = subprocess.Popen(self.argv, env=dict(self.env, **env), cwd="/", stdin=subprocess.DEVNULL, stdout=f, stderr=f)
        self.control = None

    def armed(self):
        if self.control is None:
            self.control = Control(self.run.folder, self.p.pid)
        return self.control

    def text(self):
        with open(self.log, "rb") as f:
            f.seek(self.log_from)
            return f.read().decode(errors="replace")

    def alive(self):
        return self.p.poll() is None

    def start_again(self):
        """Until it is ready; once more if it ends, because its predecessor's name is still taken."""
        end = time.monotonic() + BACK_S * PATIENCE
        self.spawn()
        while "ev=ready" not in self.text():
            if not self.alive():
                self.spawn()
            assert time.monotonic() < end, f"{self.kind} does not come back\n{self.text()[-3000:]}"
            time.sleep(0.05)


class Request:
    """One with its undisturbed answer."""

    def __init__(self, path, body):
        self.path, self.body, self.want = path, body, None


class Unserved(Exception):
    """An error with its status, or a connection that ended."""


class Nth:
    """shimmed: the daemons run under fail_nth.so, as children of this process."""

    def __init__(self, seed=1, shimmed=True, options=()):
        self.rng, self.ends = random.Random(seed), []
        self.folder = tempfile.mkdtemp(prefix="baton-nth-")
        self.make_wrappers(f"LD_PRELOAD={LIB} FAIL_NTH_DIR={self.folder}" if shimmed else "")
        self.port = free_port()  # of a conductor that is started again and again
        sets = {"kvstore.kvstore.slab_bytes": "12MiB", "kvstore.kvstore.ssd.path": os.path.join(self.folder, "ssd-{node}"),
                "kvstore.kvstore.ssd.bytes": "24MiB", "kvstore.kvstore.ssd.write_policy": "always",
                "kvstore.kvstore.ssd.probe_ms": "100ms", "prefill.engine.mem": "32MiB", "decode.engine.mem": "32MiB"}
        self.c = Cluster("--nodes", "2", "--prefill", "1", "--decode", "1", "--port", str(self.port),
                         *[w for k, v in sets.items() for w in ("--set", f"{k}={v}")], *options, bin=self.bin)
        self.daemons = {}
        try:
            self.requests = self.make_requests()
            for d in self.c.status():
                if shimmed and d["daemon"] in TARGETS and d["daemon"] not in self.daemons:
                    log = os.path.join(self.c.state_dir, "logs", self.log_of(d))
                    self.daemons[d["daemon"]] = Daemon(self, d["daemon"], d["pid"], log)
            self.wait_right("the cluster has started")
        except BaseException:
            self.stop()
            raise

    def log_of(self, d):
        with open(os.path.join(self.c.state_dir, "procs")) as f:
            for line in f:
                w = line.split()
                if w[0] == d["daemon"] and int(w[2]) == d["pid"]:
                    return os.path.basename(w[4])
        raise AssertionError(d)

    def make_wrappers(self, env):
        self.bin = os.path.join(self.folder, "bin")
        os.makedirs(self.bin)
        for kind in TARGETS:
            path = os.path.join(self.bin, "baton-" + kind)
            with open(path, "w") as f:
                f.write(WRAPPER.format(env=env, real=os.path.join(BIN, "baton-" + kind)))
            os.chmod(path, 0o755)

    # ---- requests ----
    def make_requests(self):
        lines = ["We few, we happy few, we band of brothers. ", "Now is the winter of our discontent. ",
                 "Shall I compare thee to a summer's day? ", "The quality of mercy is not strained. "]
        out = []
        for i in range(24):
            text = f"ACT {i}: " + lines[i % 4] * (4 + i % 9)
            body = {"prompt": text, "max_tokens": 6 + i % 5, "temperature": 0, "logprobs": 1, "stream": i % 2 == 0}
            if i % 6 == 5:
                body |= {"n": 2, "temperature": 0.8, "seed": i}
            out.append(Request("/v1/completions", body))
        for i in range(4):
            out.append(Request("/v1/chat/completions", {"messages": [{"role": "user", "content": lines[i] * 3}], "max_tokens": 6,
                                                        "temperature": 0, "stream": i % 2 == 0}))
        for r in out:
            r.want = self.ask(r)
        return out

    def ask(self, r, salt=None):
        """The texts and finish reasons by choice. With a new salt nothing of it is cached, and its blocks are new."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S * PATIENCE)
        try:
            body = dict(r.body, cache_salt=salt) if salt else r.body
            c.request("POST", r.path, json.dumps(body), {"Content-Type": "application/json"})
            answer = c.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise Unserved(f"{answer.status} {data[:300]!r}")
        except TimeoutError:
            raise AssertionError(f"no answer within {ANSWER_S} s: {r.body}") from None
        except (OSError, http.client.HTTPException) as e:
            raise Unserved(repr(e)) from None
        finally:
            c.close()
        return self.texts(data) if r.body["stream"] else self.texts_of([json.loads(data)])

    def texts(self, data):
        events = data.decode().split("\n\n")[:-1]
        if not events or events[-1] != "data: [DONE]":
            raise Unserved(f"the stream ended with {events[-1:]}")
        return self.texts_of([json.loads(e[len("data: "):]) for e in events[:-1]])

    def texts_of(self, events):
        out = {}
        for e in events:
            if "error" in e:
                raise Unserved(str(e["error"]))
            for ch in e["choices"]:
                text, reason = out.get(ch["index"], ("", None))
                more = ch["text"] if "text" in ch else (ch.get("delta") or ch.get("message") or {}).get("content") or ""
                out[ch["index"]] = text + more, ch["finish_reason"] or reason
        return out

    def right(self, r, salt=None):
        """Raises Unserved; anything else that is not the answer is a failure."""
        got = self.ask(r, salt)
        if EXACT:
            assert got == r.want, f"{r.body}: {got}, alone {r.want}"
        else:
            assert got.keys() == r.want.keys(), (r.body, got)

    def wait_right(self, what, watched=None):
        """Every request is answered right, each within BACK_S of the last. False: the watched daemon has ended."""
        for r in self.requests:
            end = time.monotonic() + BACK_S * PATIENCE
            while True:
                if watched and not watched.alive():
                    return False
                try:
                    self.right(r)
                    break
                except Unserved as e:
                    if watched and not watched.alive():
                        return False
                    assert time.monotonic() < end, f"{what}: not served within {BACK_S} s: {e}\n{self.logs()}"
                    time.sleep(0.1)
        return not watched or watched.alive()

    def load(self, until, out):
        """Requests from three clients until until() says so; counts go into out, what is wrong into out["wrong"]."""
        def one(seed):
            rng = random.Random(seed)
            while not until():
                try:
                    self.right(rng.choice(self.requests), rng.choice([None, f"salt {rng.random()}"]))
                    out["right"] += 1
                except Unserved as e:
                    out["unserved"] += 1
                    out["last"] = str(e)
                    time.sleep(0.02)
                except AssertionError as e:
                    out["wrong"].append(str(e))

        threads = [threading.Thread(target=one, args=(self.rng.random(),)) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    # ---- a trial ----
    def trial(self, target, kind, n, on, seconds=1.5):
        """The n-th call of the target fails while it serves. Returns a word for what came of it: unreached, went on, ended.
        Fails if an answer was wrong, a request hung, it ended without naming the cause, others ended, or if the cluster does not
        serve right answers afterwards."""
        d, out = self.daemons[target], dict(right=0, unserved=0, wrong=[], last="")
        name = f"{kind} {n}{' on' if on else ''} of {target}"
        control = d.armed()
        control.arm(kind, n, on)
        begun, hit = time.monotonic(), []

        def over():
            if not hit and control.failed():
                hit.append(time.monotonic())
            now = time.monotonic()
            return not d.alive() or (hit and now - hit[0] > 0.4) or now - begun > seconds

        self.load(over, out)
        assert not out["wrong"], f"{name}: {out['wrong'][0]}"
        return self.outcome(d, kind, name, control)

    def outcome(self, d, kind, name, control):
        """The word for it, when all serve again. On a busy machine it may be a while until a daemon that ends has ended: until
        all was answered right with the same process, it may still do so."""
        control.disarm()
        failed = control.failed()
        if not self.has_ended(d):
            if not failed:
                self.others_run(d, name)
                return "unreached"
            if self.wait_right(name, watched=d) and not self.has_ended(d):
                self.others_run(d, name)
                self.tier_is_back(name)
                return "went on"
        self.ended_well(d, kind, name, failed)
        d.start_again()
        self.others_run(d, name)
        self.wait_right(name)
        self.tier_is_back(name)
        return "ended"

    def has_ended(self, d):
        """It has ended. One that is about to says so, and may take a second to close what it has."""
        if d.alive() and any(ev in d.text() for ev in ("ev=out_of_service", "ev=stopped")):
            d.p.wait(BACK_S * PATIENCE)
        return not d.alive()

    def ended_well(self, d, kind, name, failed):
        """It has said why: in the last lines, behind which a library's backtrace may stand."""
        status, text = d.p.wait(BACK_S * PATIENCE), "\n".join(d.text().splitlines()[-60:])
        self.ends.append((d.kind, kind, status, text))
        assert failed, f"{name}: {d.kind} ended with {status}, and no call had failed\n{text[-3000:]}"
        assert status in ENDS, f"{name}: {d.kind} ended with {status}\n{text[-3000:]}"
        assert any(w in text for w in NAMED[kind]), f"{name}: {d.kind} ended with {status} and does not name the cause\n{text[-3000:]}"

    def others_run(self, target, name):
        for d in self.daemons.values():
            assert d is target or d.alive(), f"{name}: {d.kind} ended with {d.p.returncode}\n{d.text()[-2000:]}"

    def tier_is_back(self, name):
        """The SSD is in use again, as the kvstore's metrics say."""
        end = time.monotonic() + BACK_S * PATIENCE
        while True:
            at = [d["http"] for d in self.c.status() if d["daemon"] == "kvstore" and d["pid"] == self.daemons["kvstore"].p.pid]
            try:
                if not at or scrape(at[0])["baton_ssd_up"] == 1:
                    return
            except OSError:
                pass
            assert time.monotonic() < end, f"{name}: the SSD is not in use again\n{self.daemons['kvstore'].text()[-2000:]}"
            time.sleep(0.1)

    def start_trial(self, target, kind, n, on):
        """The n-th call of the target fails while it starts."""
        d, name = self.daemons[target], f"{kind} {n}{' on' if on else ''} of {target}, which starts"
        d.p.kill()
        d.p.wait()
        d.spawn(FAIL_NTH_START=f"{kind} {n} {'on' if on else 'once'}")
        end = time.monotonic() + BACK_S * PATIENCE
        while d.alive() and "ev=ready" not in d.text():
            assert time.monotonic() < end, f"{name}: neither ready nor ended\n{d.text()[-3000:]}"
            time.sleep(0.02)
        result = self.outcome(d, kind, name, d.armed())
        if result == "unreached":
            self.wait_right(name)
            self.tier_is_back(name)
        return result

    def adopted(self):
        """The kvstore that takes over what all this has left: with its slab or a new one, it serves right answers."""
        d = self.daemons["kvstore"]
        d.p.kill()
        d.p.wait()
        d.start_again()
        assert "ev=slab_adopted" in d.text() or "ev=slab_new" in d.text(), d.text()
        self.wait_right("the kvstore is started again")

    # ---- end ----
    def logs(self):
        return "\n".join(f"== {d.kind}\n{d.text()[-1500:]}" for d in self.daemons.values())

    def stop(self):
        for d in self.daemons.values():
            d.p.terminate()
        for d in self.daemons.values():
            try:
                d.p.wait(15 * PATIENCE)
            except subprocess.TimeoutExpired:
                d.p.kill()
                d.p.wait()
        subprocess.run([LOCAL, "down", "--dir", self.c.state_dir], stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=60 * PATIENCE)
        subprocess.run(["rm", "-rf", self.c.state_dir, self.c.state_dir + ".pace", self.folder])

"""One node without a conductor: etcd, kvstore, prefill and decode workers; the tests are the conductor.

The Python gRPC client is an independent peer of our C server."""
import base64
import importlib
import json
import os
import queue
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import grpc

import sanitizer
import starved
from local_cluster import free_port, set_pace
from sanitizer import PATIENCE
from scripted_peer import USUAL

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
BLOCK = 16
OK, INVALID, EXISTS, STALE, TOO_LARGE, PEER_LOST, UNAVAILABLE = 0, -1, -3, -5, -9, -30, -32

_gen = None


def protos():
    """(cluster_pb2, session_pb2), generated once into a directory of this process."""
    global _gen
    if _gen is None:
        _gen = tempfile.mkdtemp(prefix="baton-pb2-")
        subprocess.run(["protoc", f"--proto_path={ROOT}/proto", f"--python_out={_gen}",
                        f"{ROOT}/proto/cluster.proto", f"{ROOT}/proto/session.proto"], check=True)
        sys.path.insert(0, _gen)
    return importlib.import_module("cluster_pb2"), importlib.import_module("session_pb2")


def pack(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


class Node:
    """Daemons of one node; stop() ends all of them and fails if one of them reported something. engine: of both workers, unless
    sets say otherwise. exact: equal requests get equal tokens, whoever computes them beside whom."""

    def __init__(self, engine="cpu", **sets):
        self.engine = engine
        self.dir = tempfile.mkdtemp(prefix="baton-node-")
        self.pace(0)
        self.sets = sets
        self.procs = {}
        self.cluster_pb2, self.pb = protos()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self):
        self.etcd = f"127.0.0.1:{free_port()}"
        url, purl = f"http://{self.etcd}", f"http://127.0.0.1:{free_port()}"
        self._spawn("etcd", ["etcd", "--name", "t", "--data-dir", f"{self.dir}/etcd", "--listen-client-urls", url,
                             "--advertise-client-urls", url, "--listen-peer-urls", purl,
                             "--initial-advertise-peer-urls", purl, "--initial-cluster", f"t={purl}",
                             "--logger", "zap", "--log-level", "error"])
        assert self._wait(lambda: self.get("") is not None, 60, "etcd"), self.log("etcd")
        self.start("kvstore")
        self.start("prefill")
        self.start("decode")
        for kind in ("kvstore", "prefill", "decode"):
            self.member(kind)
        s = self.cluster_pb2.ClusterSettings()
        s.ParseFromString(self.get("/baton/baton/settings")[0])
        self.settings = s
        self.exact = all('exact="1"' in k for w in ("prefill", "decode") for k in self.metrics(w)
                         if k.startswith("baton_worker_engine_info"))

    def _spawn(self, name, argv):
        log = open(f"{self.dir}/{name}.log", "ab")
        self.procs[name] = subprocess.Popen(USUAL + argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            env=dict(os.environ, BATON_ENGINE_PACE=f"{self.dir}/pace"))
        starved.WATCH.also(self.procs[name].pid, name)
        log.close()

    def pace(self, step_ms):
        """As Cluster.pace."""
        set_pace(f"{self.dir}/pace", step_ms)

    def start(self, kind):
        conf = {"node.id": "n1", "etcd.endpoints": self.etcd, "run_dir": f"{self.dir}/run", "model.path": MODEL,
                "kv.block_tokens": BLOCK, "kv.flow_chunk_tokens": 64}
        if kind == "kvstore":
            conf.update({"kvstore.slab_bytes": "24MiB", "kvstore.wire.listen": "127.0.0.1"})
        else:
            conf.update({"engine.device": self.engine, "engine.threads": 1, "engine.pages": 400, "engine.calibrate_ms": 0})
        conf.update(self.sets.get(kind, {}))
        os.makedirs(f"{self.dir}/run", exist_ok=True)
        argv = [f"{BUILD}/bin/baton-{kind}", "--config", f"{self.dir}/{kind}.yaml"]
        with open(f"{self.dir}/{kind}.yaml", "w"):
            pass
        for k, v in conf.items():
            argv += ["--set", f"{k}={v}"]
        self._spawn(kind, argv)

    @staticmethod
    def _wait(check, seconds, what):
        end = time.monotonic() + seconds * PATIENCE
        while time.monotonic() < end:
            try:
                v = check()
                if v:
                    return v
            except OSError:
                pass
            time.sleep(0.05)
        return None

    def get(self, prefix):
        """Values of the keys with this prefix, through etcd's JSON gateway."""
        key = prefix.encode() or b"/"
        end = key[:-1] + bytes([key[-1] + 1])
        body = {"key": base64.b64encode(key).decode(), "range_end": base64.b64encode(end).decode()}
        req = urllib.request.Request(f"http://{self.etcd}/v3/kv/range", json.dumps(body).encode())
        with urllib.request.urlopen(req, timeout=60) as r:
            kvs = json.load(r).get("kvs", [])
        return [base64.b64decode(kv.get("value", "")) for kv in kvs]

    def member(self, kind, state=1, seconds=60):
        def ready():
            if self.procs[kind].poll() is not None:
                raise RuntimeError(f"{kind} ended: {self.log(kind)}")
            for v in self.get(f"/baton/baton/members/{kind}/"):
                m = self.cluster_pb2.Member()
                m.ParseFromString(v)
                if m.state == state and m.pid == self.procs[kind].pid:
                    return m
            return None
        m = self._wait(ready, seconds, kind)
        assert m, f"{kind} is not registered: {self.log(kind)}"
        return m

    def log(self, kind):
        with open(f"{self.dir}/{kind}.log", errors="replace") as f:
            return "".join(f.readlines()[-30:])

    def metrics(self, kind):
        with urllib.request.urlopen(f"http://{self.member(kind).http}/metrics", timeout=60) as r:
            out = {}
            for line in r.read().decode().splitlines():
                if line and line[0] != "#":
                    k, v = line.rsplit(" ", 1)
                    out[k] = float(v)
            return out

    def metric(self, kind, name):
        return sum(v for k, v in self.metrics(kind).items() if k == name or k.startswith(name + "{"))

    def connect(self, kind, mixed=None):
        return Session(self, kind, mixed)

    def stop(self):
        codes, found = {}, []
        for name in ("decode", "prefill", "kvstore", "etcd"):
            p = self.procs.get(name)
            if p is None:
                continue
            if p.poll() is None:
                p.send_signal(signal.SIGTERM)
                try:
                    p.wait(60 * PATIENCE)
                except subprocess.TimeoutExpired:
                    p.kill()
                    p.wait()
            codes[name] = p.returncode
            with open(f"{self.dir}/{name}.log", errors="replace") as f:
                text = sanitizer.in_log(f.read())
            found += [f"== {name}\n{text}"] if text else []
        shutil.rmtree(self.dir, ignore_errors=True)
        assert not found, "\n".join(found)
        return codes


class Session:
    """A conductor's session with a worker or a kvstore: heartbeats, and what came, by (request, epoch)."""

    def __init__(self, node, kind, mixed=None):
        pb = self.pb = node.pb
        self.kind = kind
        self.mixed = mixed  # (step_ms, gap_ms) that this conductor says; None: it is an older one
        m = node.member(kind)
        to, frm = (pb.ToKvstore, pb.FromKvstore) if kind == "kvstore" else (pb.ToWorker, pb.FromWorker)
        self.to = to
        self.out = queue.Queue()
        self.cond = threading.Condition()
        self.got = []
        self.index = {}  # (field, request, epoch) -> messages; ("token", request, epoch) -> tokens
        self.closed = False
        self.channel = grpc.insecure_channel(m.rpc, options=[("grpc.use_local_subchannel_pool", 1)])
        method = "/baton.Kvstore/Session" if kind == "kvstore" else "/baton.Worker/Session"
        hello = to(hello=pb.SessionHello(version=1, cluster="baton", name="test", node="n1", incarnation=7,
                                         root_key=node.settings.root_key, layout_id=node.settings.layout_id,
                                         expect_incarnation=m.incarnation, mixed=self._mixed()))
        self.out.put(hello)
        self.call = self.channel.stream_stream(method, request_serializer=to.SerializeToString,
                                               response_deserializer=frm.FromString)(iter(self.out.get, None))
        self.silent = False
        self.beat_at, self.beats = 0.0, 0
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        self.wait(lambda: self.find("hello"), "hello")

    def _read(self):
        try:
            for m in self.call:
                self._beat_if_due()
                with self.cond:
                    self._note(m)
                    self.cond.notify_all()
        except grpc.RpcError as e:
            self.error = e
        with self.cond:
            self.closed = True
            self.cond.notify_all()

    def _note(self, m):
        field = m.WhichOneof("m")
        x = getattr(m, field)
        self.got.append(m)
        if field == "tokens":
            for t in x.tokens:
                self.index.setdefault(("token", t.request, t.epoch), []).append(t)
        elif field in ("hello", "heartbeat"):
            self.index.setdefault((field,), []).append(x)
        else:
            self.index.setdefault((field, x.request, x.epoch), []).append(x)

    def _beat(self):
        while not self.closed:
            self._beat_if_due()
            time.sleep(0.1)

    def _beat_if_due(self):
        """From whichever thread runs: the one that is for it may wait for the interpreter's lock for as long as the daemon
        waits for a word, while others hand on thousands of tokens."""
        now = time.monotonic()
        if now - self.beat_at > 0.4 and not self.silent:
            self.beat_at = now
            self.beats += 1
            self.out.put(self.to(heartbeat=self.pb.Heartbeat(seq=self.beats, mixed=self._mixed())))

    def _mixed(self):
        return self.mixed and self.pb.MixedSteps(step_ms=self.mixed[0], gap_ms=self.mixed[1])

    def send(self, **m):
        self.out.put(self.to(**m))

    def find(self, field, request=None, epoch=1):
        return list(self.index.get((field, request, epoch) if request is not None else (field,), []))

    def tokens(self, request, epoch=1):
        return list(self.index.get(("token", request, epoch), []))

    def wait(self, check, what, seconds=60):
        seconds *= PATIENCE
        end = time.monotonic() + seconds
        with self.cond:
            while True:
                v = check()
                if v:
                    return v
                assert not self.closed, f"session with {self.kind} ended while waiting for {what}: {getattr(self, 'error', None)}"
                left = end - time.monotonic()
                assert left > 0, f"not within {seconds} s: {what}"
                self._beat_if_due()
                self.cond.wait(min(left, 0.2))

    def ended(self, request, epoch=1, seconds=60):
        return self.wait(lambda: self.find("ended", request, epoch), f"Ended of {request:x}.{epoch}", seconds)[0]

    def close(self):
        self.out.put(None)
        self.call.cancel()
        self.channel.close()
        self.closed = True


class Conductor:
    """Sessions with the three daemons of a node, and the two ways to run a request there."""

    def __init__(self, node):
        self.node, self.pb = node, node.pb
        self.kv, self.p, self.d = (node.connect(k) for k in ("kvstore", "prefill", "decode"))

    def close(self):
        for s in (self.kv, self.p, self.d):
            s.close()

    def keys(self, tokens):
        import hashlib
        key, out = self.node.settings.root_key, b""
        for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hashlib.sha256(key + pack(tokens[i:i + BLOCK])).digest()
            out += key
        return out

    def reserve(self, request, tokens, epoch=1, wait=True, **more):
        self.kv.send(reserve=self.pb.Reserve(request=request, epoch=epoch, role=self.pb.WRITE, keys=self.keys(tokens),
                                             n_tokens=len(tokens), keep=True, **more))
        if wait:
            r = self.kv.wait(lambda: self.kv.find("reserved", request, epoch), "Reserved")[0]
            assert r.status == OK, r
            return r

    def submit(self, session, request, tokens, phases, max_new, epoch=1, n_prompt=None, stop=(), left_ms=0,
               choice=0, n=0, prompt_logprobs=False, prompt_top=0, priority=0, **sampling):
        s = dict(temperature=0, top_p=1, repetition_penalty=1, seed=1, logprobs=0, max_new=max_new, stop_ids=stop)
        s.update(sampling)
        session.send(submit=self.pb.Submit(request=request, epoch=epoch, phases=phases, tokens=pack(tokens),
                                           n_prompt=n_prompt or len(tokens), sampling=self.pb.Sampling(**s),
                                           root_key=self.node.settings.root_key, left_ms=left_ms,
                                           choice=choice, n=n, prompt_logprobs=prompt_logprobs,
                                           prompt_top=prompt_top, priority=priority))

    def release(self, request, epoch=1):
        self.kv.send(release=self.pb.Release(request=request, epoch=epoch))

    def both(self, worker, request, tokens, max_new, epoch=1, **more):
        self.reserve(request, tokens, epoch, wait=False)
        self.submit(worker, request, tokens, self.pb.BOTH, max_new, epoch, **more)
        if more.get("n", 0) > 1:
            return self.choices(request, more["n"], more.get("choice", 0), [worker], epoch)
        return self.result(request, max_new, [worker], epoch)

    def apart(self, request, tokens, max_new, epoch=1, **more):
        self.reserve(request, tokens, epoch, wait=False)
        self.submit(self.d, request, tokens, self.pb.DECODE, max_new, epoch, **more)
        self.submit(self.p, request, tokens, self.pb.PREFILL, max_new, epoch, **more)
        if more.get("n", 0) > 1:
            return self.choices(request, more["n"], more.get("choice", 0), [self.p, self.d], epoch)
        return self.result(request, max_new, [self.p, self.d], epoch)

    def result(self, request, max_new, workers, epoch=1):
        """Tokens by offset, after everybody ended well; the grant is released."""
        for w in workers:
            e = w.ended(request, epoch)
            assert e.status == OK, (w.kind, e)
        self.release(request, epoch)
        toks = [t for w in workers for t in w.tokens(request, epoch)]
        assert [t.offset for t in toks] == list(range(len(toks))), [t.offset for t in toks]
        assert len(toks) <= max_new
        assert all(t.finish == 0 for t in toks[:-1]) and toks[-1].finish != 0
        return [t.token for t in toks]

    def choices(self, request, n, first, workers, epoch=1):
        """A list of tokens for each choice, after everybody ended well."""
        for w in workers:
            e = w.ended(request, epoch)
            assert e.status == OK, (w.kind, e)
        self.release(request, epoch)
        toks = [t for w in workers for t in w.tokens(request, epoch)]
        out = []
        for k in range(first, first + n):
            mine = [t for t in toks if t.choice == k]
            assert [t.offset for t in mine] == list(range(len(mine))), (k, [t.offset for t in mine])
            assert mine and all(t.finish == 0 for t in mine[:-1]) and mine[-1].finish != 0
            out.append([t.token for t in mine])
        assert sum(map(len, out)) == len(toks)
        return out

    def resident(self, tokens, blocks, seconds=60):
        """Waits until the pool has the first blocks of tokens: sealing goes on after a request has ended."""
        end = time.monotonic() + seconds * PATIENCE
        while True:
            r = random.getrandbits(63) | 1
            found = self.reserve(r, tokens).resident_blocks
            self.release(r)
            if found >= blocks:
                return
            assert time.monotonic() < end, (found, blocks)
            time.sleep(0.05)

    def idle(self, seconds=60):
        """Nothing is left of any request: pages, slots, grants, leases."""
        end = time.monotonic() + seconds * PATIENCE
        for s in (self.p, self.d, self.kv):
            s.wait(lambda s=s: s.find("heartbeat"), "a heartbeat", seconds)
        while True:
            loads = []
            for s in (self.p, self.d):
                loads.append(s.find("heartbeat")[-1].load)
            pool = self.kv.find("heartbeat")[-1].pool
            if all(x.running == 0 and x.waiting == 0 and x.pages_free == x.pages_total and
                   x.slots_free == x.slots_total for x in loads) and \
                    pool.leases == 0 and pool.slots_writing == 0 and pool.slots_quarantine == 0:
                return
            assert time.monotonic() < end, (loads, pool)
            time.sleep(0.1)

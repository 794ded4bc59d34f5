"""Real kvstores on a private etcd, scripted workers (tests/tools/kv_worker), and a conductor in Python
that speaks proto/session.proto through grpcio: an independent peer of the C server."""
import base64
import glob
import json
import os
import queue
import re
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
from local_cluster import free_port
from sanitizer import PATIENCE
from scripted_peer import USUAL

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m")
BLOCK = 16
CHUNK = 64
WAIT_S = 60  # only what hangs takes so long
LAYERS = 2  # of the model; hand_off checks it


def load_protos():
    out = tempfile.mkdtemp(prefix="baton-pb-")
    subprocess.run(["protoc", f"--proto_path={ROOT}/proto", f"--python_out={out}",
                    *glob.glob(f"{ROOT}/proto/*.proto")], check=True)
    sys.path.insert(0, out)
    import session_pb2
    shutil.rmtree(out)
    return session_pb2


pb = load_protos()
STATUS = {}
with open(os.path.join(ROOT, "common", "base", "status.def")) as f:
    for name, value in re.findall(r"BT_STATUS\((\w+), (-?\d+)", f.read()):
        STATUS[name] = int(value)


class Etcd:
    def __init__(self, folder):
        self.addr = f"127.0.0.1:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        url = f"http://{self.addr}"
        self.log = open(os.path.join(folder, "etcd.log"), "w")
        self.p = subprocess.Popen(
            [*USUAL, "etcd", "--name", "t", "--data-dir", os.path.join(folder, "etcd"),
             "--listen-client-urls", url, "--advertise-client-urls", url,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", f"t={peer}"], stdout=self.log, stderr=self.log)
        end = time.monotonic() + WAIT_S * PATIENCE
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=WAIT_S).read()
                return
            except OSError as e:
                if self.p.poll() is not None or time.monotonic() > end:
                    with open(self.log.name) as f:
                        raise AssertionError(f"etcd does not start: {e}\n{f.read()[-3000:]}") from e
                time.sleep(0.05)

    def ask(self, what, key):
        body = json.dumps({"key": base64.b64encode(key.encode()).decode()}).encode()
        return json.loads(urllib.request.urlopen(f"http://{self.addr}/v3/kv/{what}", body, timeout=WAIT_S).read())

    def has(self, key):
        return self.ask("range", key).get("count", "0") != "0"

    def delete(self, key):
        reply = self.ask("deleterange", key)
        assert reply.get("deleted") == "1", reply

    def stop(self):
        self.p.kill()
        self.p.wait()
        self.log.close()


class Kvstore:
    killed = False  # its wire process, by a signal of a fault

    def __init__(self, folder, etcd, node, slab="16MiB", expect_ready=True, run_dir=None, **sets):
        self.node, self.name = node, f"kvstore-{node}"
        self.run_dir = run_dir or os.path.join(folder, f"run-{node}")
        os.makedirs(self.run_dir, exist_ok=True)
        self.log_path = os.path.join(folder, f"kvstore-{node}-{time.monotonic_ns()}.log")
        args = {"cluster.name": f"t{os.getpid()}", "node.id": node, "etcd.endpoints": etcd.addr,
                "run_dir": self.run_dir, "model.path": MODEL, "kv.block_tokens": BLOCK,
                "kv.flow_chunk_tokens": CHUNK, "kvstore.slab_bytes": slab, "log.level": "debug"}
        args.update({k.replace("__", "."): v for k, v in sets.items()})
        cmd = [*USUAL, os.path.join(BUILD, "bin", "baton-kvstore")]
        for k, v in args.items():
            cmd += ["--set", f"{k}={v}"]
        with open(self.log_path, "w") as log:
            self.p = subprocess.Popen(cmd, stdout=log, stderr=log)
        starved.WATCH.also(self.p.pid, self.name)
        if expect_ready:
            m = self.wait_log(r"ev=ready rpc=(\S+) http=(\S+) incarnation=(\w+) slab=(\S+) slots=(\d+)")
            self.rpc, self.http, self.inc = m[1], m[2], int(m[3], 16)
            self.slab, self.slots = m[4], int(m[5])

    def log(self):
        with open(self.log_path) as f:
            return f.read()

    def wait_log(self, pattern, timeout=WAIT_S):
        end = time.monotonic() + timeout * PATIENCE
        while time.monotonic() < end:
            m = re.search(pattern, self.log())
            if m:
                return m
            if self.p.poll() is not None and not re.search(pattern, self.log()):
                break
            time.sleep(0.02)
        raise AssertionError(f"{self.name}: no /{pattern}/\n{self.log()[-4000:]}")

    def metrics(self):
        text = urllib.request.urlopen(f"http://{self.http}/metrics", timeout=WAIT_S).read().decode()
        return {k: float(v) for k, v in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.M)}

    def wait_metric(self, name, want, timeout=WAIT_S):
        end = time.monotonic() + timeout * PATIENCE
        while True:
            got = self.metrics()[name]
            if got == want:
                return
            if time.monotonic() > end:
                raise AssertionError(f"{self.name}: {name} is {got}, not {want}\n{self.log()[-3000:]}")
            time.sleep(0.05)

    def wait_quiet(self, timeout=WAIT_S):
        """Nothing is held any more, by anybody. The gauges are those of the last tick (100 ms)."""
        names = ("baton_pool_leases", 'baton_pool_slots{state="writing"}',
                 'baton_pool_slots{state="quarantine"}', "baton_kvstore_grants",
                 "baton_pool_transit_slots", "baton_kvstore_opens")
        end, since = time.monotonic() + timeout * PATIENCE, None
        while since is None or time.monotonic() - since < 0.25:
            m = self.metrics()
            held = {name: m[name] for name in names if m[name] != 0}
            since = None if held else since or time.monotonic()
            if time.monotonic() > end:
                raise AssertionError(f"{self.name} holds {held}\n{self.log()[-3000:]}")
            time.sleep(0.05)

    def stop(self, sig=signal.SIGTERM):
        if self.p.poll() is None:
            self.p.send_signal(sig)
        return self.p.wait(WAIT_S * PATIENCE)

    def report(self):
        return sanitizer.in_log(self.log(), self.killed)


class Worker:
    """tests/tools/kv_worker: commands in, events out."""

    def __init__(self, kv, name, inc=1):
        self.name, self.lines, self.cond = name, [], threading.Condition()
        self.err = tempfile.TemporaryFile("w+", errors="replace")
        self.p = subprocess.Popen(
            [*USUAL, os.path.join(BUILD, "tests", "tools", "kv_worker"), f"run_dir={kv.run_dir}",
             f"name={name}", f"inc={inc}", f"model={MODEL}", f"tokens={BLOCK}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.err, text=True,
            bufsize=1)
        starved.WATCH.also(self.p.pid, name)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.wait("attached")

    def _read(self):
        for line in self.p.stdout:
            with self.cond:
                self.lines.append(line.rstrip())
                self.cond.notify_all()

    def say(self, text):
        self.p.stdin.write(text + "\n")

    def wait(self, pattern, timeout=WAIT_S):
        """The first line that matches; it and all before it are used up."""
        end = time.monotonic() + timeout * PATIENCE
        with self.cond:
            while True:
                for i, line in enumerate(self.lines):
                    m = re.match(pattern, line)
                    if m:
                        del self.lines[:i + 1]
                        return m
                left = end - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"{self.name}: no /{pattern}/ in {self.lines}")
                self.cond.wait(left)

    def open(self, request, mode, epoch=1):
        """(status, resident blocks, number of slots)"""
        self.say(f"open {request} {epoch} {mode}")
        m = self.wait(rf"opened {request} {epoch} {mode} status=(\w+) n=(\d+) resident=(\d+)")
        return m[1], int(m[3]), int(m[2])

    def stop(self):
        if self.p.poll() is None:
            self.say("quit")
        code = self.p.wait(WAIT_S * PATIENCE)
        self.reader.join(5)
        return code

    def report(self):
        self.err.seek(0)
        return sanitizer.in_log(self.err.read())

    def kill(self):
        self.p.kill()
        self.p.wait()


class Conductor:
    """One session with one kvstore. Heartbeats go out by themselves until `mute`."""

    def __init__(self, kv, hello=True, **over):
        self.kv = kv
        self.channel = grpc.insecure_channel(kv.rpc)
        self.out, self.got, self.cond = queue.Queue(), [], threading.Condition()
        self.mute, self.code, self.detail, self.said_s = False, None, None, 0.0
        call = self.channel.stream_stream("/baton.Kvstore/Session",
                                          request_serializer=lambda m: m.SerializeToString(),
                                          response_deserializer=pb.FromKvstore.FromString)
        self.call = call(iter(self.out.get, None))
        self.threads = [threading.Thread(target=self._read, daemon=True),
                        threading.Thread(target=self._beat, daemon=True)]
        self.closed = threading.Event()
        for t in self.threads:
            t.start()
        if hello:
            self.say_hello(**over)

    def say_hello(self, **over):
        h = pb.SessionHello(version=1, cluster=f"t{os.getpid()}", name="conductor-t", node="n1",
                            incarnation=77, root_key=self.root(), layout_id=self.layout(),
                            expect_incarnation=self.kv.inc)
        for k, v in over.items():
            setattr(h, k, v)
        self.out.put(pb.ToKvstore(hello=h))

    # root key and layout are read from the slab's first page: whatever this model gives
    def root(self):
        with open(self.kv.slab, "rb") as f:
            return f.read(4096)[88:120]

    def layout(self):
        with open(self.kv.slab, "rb") as f:
            return struct.unpack_from("<Q", f.read(64), 32)[0]

    def _read(self):
        try:
            for m in self.call:
                with self.cond:
                    self.got.append(m)
                    self.cond.notify_all()
        except grpc.RpcError:
            pass
        with self.cond:
            self.code, self.detail = self.call.code(), self.call.details()
            self.cond.notify_all()

    def _beat(self):
        seq = 0
        while not self.closed.wait(0.3):
            if not self.mute:
                seq += 1
                self.said_s = time.monotonic()
                self.out.put(pb.ToKvstore(heartbeat=pb.Heartbeat(seq=seq)))

    def wait(self, kind, timeout=WAIT_S, match=lambda m: True):
        end = time.monotonic() + timeout * PATIENCE
        with self.cond:
            while True:
                for i, m in enumerate(self.got):
                    if m.WhichOneof("m") == kind and match(getattr(m, kind)):
                        del self.got[i]
                        return getattr(m, kind)
                left = end - time.monotonic()
                if left <= 0 or self.code is not None:
                    raise AssertionError(f"no {kind} from {self.kv.name}; {self.code} {self.detail}; "
                                         f"{self.got}\n{self.kv.log()[-3000:]}")
                self.cond.wait(left)

    def wait_end(self, timeout=WAIT_S):
        end = time.monotonic() + timeout * PATIENCE
        with self.cond:
            while self.code is None:
                assert end > time.monotonic(), "the session does not end"
                self.cond.wait(0.1)
        return self.code, self.detail

    def reserve(self, request, keys, n_tokens, epoch=1, receive_from=None, **over):
        r = pb.Reserve(request=request, epoch=epoch, keys=b"".join(keys), n_tokens=n_tokens, **over)
        if receive_from:
            r.role = pb.RECEIVE
            r.peer, r.peer_rpc, r.peer_incarnation = (receive_from.name, receive_from.rpc,
                                                      receive_from.inc)
        self.out.put(pb.ToKvstore(reserve=r))
        return self.wait("reserved", match=lambda m: (m.request, m.epoch) == (request, epoch))

    def release(self, request, epoch=1):
        self.out.put(pb.ToKvstore(release=pb.Release(request=request, epoch=epoch)))

    def close(self):
        self.closed.set()
        self.out.put(None)
        self.channel.close()


def keys(seed, n):
    return [bytes([seed]) + struct.pack("<I", i) + bytes(27) for i in range(n)]


class Nodes:
    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="baton-kv-")
        self.etcd = Etcd(self.folder)
        self.made = []

    def add(self, thing):
        self.made.append(thing)
        return thing

    def kvstore(self, node, **kw):
        return self.add(Kvstore(self.folder, self.etcd, node, **kw))

    def worker(self, kv, name, inc=1):
        return self.add(Worker(kv, name, inc))

    def conductor(self, kv, **kw):
        return self.add(Conductor(kv, **kw))

    def end(self):
        for t in self.made:  # pytest shows it when the test has failed
            if isinstance(t, Kvstore):
                print(f"== {t.name}", *[line for line in t.log().splitlines() if "level=debug" not in line][-40:], sep="\n")
        for t in reversed(self.made):
            if isinstance(t, Conductor):
                t.close()
        for t in reversed(self.made):
            if isinstance(t, Worker) and t.p.poll() is None:
                t.kill()
        bad = []
        for t in reversed(self.made):
            if isinstance(t, Kvstore) and t.p.poll() is None:
                code = t.stop()
                if code != 0 or os.path.exists(t.slab):
                    bad.append(f"{t.name} ended with {code}\n{t.log()[-6000:]}")
        for t in self.made:  # one that was killed leaves its slab to the next, which there is none of
            if isinstance(t, Kvstore) and t.p.returncode == -signal.SIGKILL and os.path.exists(t.slab):
                os.unlink(t.slab)
        bad += [t.report() for t in self.made if not isinstance(t, Conductor) and t.report()]
        self.etcd.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not bad, "\n".join(bad)


def items(tokens):
    return -(-tokens // CHUNK) * LAYERS


def layers_of(kv):
    with open(kv.slab, "rb") as f:
        return int.from_bytes(f.read(64)[40:44], "little")


def hand_off(ka, kb, ca, cb, p, d, request, k, tokens, seed, keep=False, epoch=1):
    """One whole hand-off; returns (resident at A, resident at B, FlowDone)."""
    assert layers_of(ka) == LAYERS
    a = ca.reserve(request, k, tokens, epoch)
    b = cb.reserve(request, k, tokens, epoch, receive_from=ka, keep=keep)
    assert a.status == 0 and b.status == 0, (a, b)
    d.say(f"open {request} {epoch} r")
    assert p.open(request, "w", epoch)[0] == "OK"
    d.wait(rf"opened {request} {epoch} r status=OK")
    p.say(f"fill {request} {epoch} {seed}")
    p.wait(f"filled {request}")
    for i in range(1, items(tokens) + 1):
        p.say(f"raise {request} {epoch} {i}")
    p.say(f"trailer {request} {epoch} 1234")
    done = cb.wait("flow_done", match=lambda m: m.request == request)
    d.wait(rf"trailer {request} {epoch} token=1234 finished=0")
    d.say(f"check {request} {epoch} {seed}")
    m = d.wait(rf"check {request} bad=(\d+) progress=(\d+)")
    assert (int(m[1]), int(m[2])) == (0, items(tokens))
    p.say(f"close {request} {epoch} w 0")
    d.say(f"close {request} {epoch} r 0")
    ca.release(request, epoch)
    cb.release(request, epoch)
    return a.resident_blocks, b.resident_blocks, done

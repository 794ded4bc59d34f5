"""A local cluster through deploy/local/baton-local, in a state directory of its own: for tests (conftest.py) and benches,
which need no pytest. BATON_PREFIX names an installation, such as an unpacked bundle: then that is started and not
what the build tree has."""
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading

import sanitizer
import starved
from sanitizer import PATIENCE

sanitizer.set_options()
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
PREFIX = os.environ.get("BATON_PREFIX")
BIN = os.path.join(os.path.abspath(PREFIX) if PREFIX else BUILD, "bin")
LOCAL = os.path.join(BIN, "baton-local") if PREFIX else os.path.join(ROOT, "deploy", "local", "baton-local")
RANDOM = random.SystemRandom()
# Options of every local cluster, before a test's own: the same tests in another configuration.
EVERY_CLUSTER = os.environ.get("BATON_TEST_CLUSTER", "").split()


class Cluster:
    """A running local cluster; everything it starts ends with stop()."""

    headers = {}  # of every request
    tls = None  # of its HTTPS: an SSLContext
    killed = False  # processes, by signals of faults

    def __init__(self, *options, bin=BIN, api_key=None):
        if api_key:
            self.headers = {"Authorization": "Bearer " + api_key}
        # Ended by a time limit, a bench or a test leaves through its finally and stops what it started.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self.ready = {}  # by log: how far it was read, fields of its last ev=ready
        self.state_dir = tempfile.mkdtemp(prefix="baton-test-")
        self.pace(0)
        env = dict(os.environ, BATON_BIN=bin, BATON_ENGINE_PACE=self.state_dir + ".pace")
        p = subprocess.run([LOCAL, "up", "--dir", self.state_dir, "--port", "0", *EVERY_CLUSTER, *options], env=env,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           timeout=240 * PATIENCE)
        if p.returncode != 0:
            text = p.stderr.decode(errors="replace")
            self._remove()
            raise RuntimeError(f"baton-local up ended with {p.returncode}: {text}")
        self.url = p.stdout.decode().strip().splitlines()[-1]
        scheme, address = self.url.split("://")
        self.host, port = address.split(":")
        self.port = int(port)
        if scheme == "https":
            self.tls = ssl.create_default_context(cafile=os.path.join(self.state_dir, "tls", "ca.crt"))
        if "--keys" in options:
            with open(os.path.join(self.state_dir, "keys", "inference.key")) as f:
                self.headers = {"Authorization": "Bearer " + f.read().strip()}
        try:
            self.model = self.get("/v1/models")["data"][0]["id"]
        except Exception:
            self.stop()
            raise

    def pace(self, step_ms):
        """From now on each step of a cpu or null engine takes so much longer, until another call: what runs is still running
        when a test does something to it, however fast the machine is and however late the test comes."""
        set_pace(self.state_dir + ".pace", step_ms)

    def stop(self):
        """Fails if a daemon reported something while it ran or while it ended."""
        if not os.path.exists(self.state_dir):
            return
        subprocess.run([LOCAL, "down", "--dir", self.state_dir], timeout=120 * PATIENCE, check=True)
        found = self.reports()
        self._remove()
        assert not found, "\n".join(found)

    def _remove(self):
        shutil.rmtree(self.state_dir, ignore_errors=True)
        os.unlink(self.state_dir + ".pace")

    def reports(self):
        """Failed assertions and what sanitizers wrote into the daemons' logs."""
        found = []
        for name in sorted(os.listdir(os.path.join(self.state_dir, "logs"))):
            with open(os.path.join(self.state_dir, "logs", name), errors="replace") as f:
                text = sanitizer.in_log(f.read(), self.killed)
                found += [f"== {name}\n{text}"] if text else []
        return found

    def status(self):
        """What `baton-local status -o json` says, without its thirty processes: tests ask some times a second."""
        rows, procs = [], os.path.join(self.state_dir, "procs")
        if not os.path.exists(procs):
            return rows
        with open(procs) as f:
            for kind, node, pid, start, log in (line.split() for line in f):
                ready = self.ready_line(log)
                starved.WATCH.also(pid, node and f"{kind} of {node}" or kind)
                if kind == "etcd":
                    with open(os.path.join(self.state_dir, "etcd.addr")) as at:
                        ready["rpc"] = at.read().strip()
                state = "dead" if start_time(pid) != start else "running" if "rpc" in ready else "starting"
                rows.append({"daemon": kind, "node": node, "pid": int(pid), "incarnation": ready.get("incarnation", ""),
                             "state": state, "grpc": ready.get("rpc", ""), "http": ready.get("http", ""), "log": log})
        return rows

    def ready_line(self, log):
        """Fields of a log's last ev=ready line; what was read before is not read again."""
        at, fields = self.ready.get(log, (0, {}))
        with open(log, "rb") as f:
            f.seek(at)
            for line in f:
                if not line.endswith(b"\n"):
                    break
                at += len(line)
                if re.search(rb'ev"?[=:]"?ready\b', line):
                    fields = {k.decode(): v.decode() for k, v in re.findall(rb'[ ,{"](rpc|http|incarnation)"?[=:]"?([^ ",}]+)', line)}
        self.ready[log] = at, fields
        return dict(fields)

    def daemon(self, kind, index=0):
        return [d for d in self.status() if d["daemon"] == kind][index]

    def logs(self):
        out = []
        for name in sorted(os.listdir(os.path.join(self.state_dir, "logs"))):
            with open(os.path.join(self.state_dir, "logs", name), errors="replace") as f:
                out.append(f"== {name}\n" + "".join(f.readlines()[-40:]))
        return "\n".join(out)

    def replans(self):
        """The conductor's lines about requests that it planned again."""
        with open(os.path.join(self.state_dir, "logs", "conductor.log"), errors="replace") as f:
            return [line.strip() for line in f if "ev=request_replan " in line]

    # ---- HTTP ----
    def connect(self, timeout=60 * PATIENCE):
        return connection(self.host, self.port, timeout, self.tls)

    def request(self, method, path, body=None, headers=None, timeout=60 * PATIENCE):
        """Returns (status, headers, body bytes)."""
        c = self.connect(timeout)
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        h = dict(self.headers, **({"Content-Type": "application/json"} if data is not None else {}))
        h.update(headers or {})
        c.request(method, path, data, h)
        r = c.getresponse()
        out = r.status, dict((k.lower(), v) for k, v in r.getheaders()), r.read()
        c.close()
        return out

    def get(self, path):
        status, _, body = self.request("GET", path)
        assert status == 200, (status, body)
        return json.loads(body)

    def post(self, path, body, expect=200, headers=None):
        status, _, data = self.request("POST", path, body, headers)
        assert status == expect, (status, data)
        return json.loads(data)

    def stream(self, path, body, headers=None):
        """Yields the JSON of each SSE event, then the string [DONE] if it came."""
        c = self.connect()
        c.request("POST", path, json.dumps(dict(body, stream=True)),
                  dict(self.headers, **{"Content-Type": "application/json"}, **(headers or {})))
        r = c.getresponse()
        assert r.status == 200, (r.status, r.read())
        buf = b""
        try:
            while True:
                piece = r.read1(65536)
                if not piece:
                    break
                buf += piece
                while b"\n\n" in buf:
                    event, buf = buf.split(b"\n\n", 1)
                    assert event.startswith(b"data: "), event
                    text = event[6:].decode()
                    yield text if text == "[DONE]" else json.loads(text)
        finally:
            c.close()
        assert buf == b"", buf

    def complete(self, prompt, max_tokens=48, **more):
        return self.post("/v1/completions",
                         dict({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}, **more))

    # ---- metrics ----
    def metrics(self, kind, index=0):
        return scrape(self.daemon(kind, index)["http"], self.headers, self.tls if kind == "conductor" else None)


def set_pace(path, step_ms):
    """Of engines whose environment has BATON_ENGINE_PACE=path. One write of one length: no reader sees a part of it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(fd, b"%012d" % int(step_ms * 1000), 0)
    os.close(fd)


HELD = []  # sockets that keep the ports of free_port for this process


def free_port():
    """For a server that is started later, or again: a port that the kernel gives to nobody who asks for any. A socket that
    does not listen keeps it from other tests. A server with SO_REUSEADDR (etcd, gRPC, our HTTP) may listen there."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
        first = int(f.read().split()[0])
    while True:
        s = socket.socket()
        try:
            s.bind(("127.0.0.1", RANDOM.randrange(10000, first) if first > 12000 else 0))
        except OSError:
            s.close()
            continue
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: two tests could have the same port
        HELD.append(s)
        return s.getsockname()[1]


def start_time(pid):
    """Of a process in clock ticks since the machine started, as in STATE/procs; empty: it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def connection(host, port, timeout, tls=None):
    return http.client.HTTPSConnection(host, port, timeout=timeout, context=tls) if tls else \
        http.client.HTTPConnection(host, port, timeout=timeout)


def scrape(address, headers=None, tls=None):
    """All samples of a daemon's /metrics: {'name{labels}': value}. Shows the key in BATON_API_KEY, if it is set."""
    key = os.environ.get("BATON_API_KEY")
    headers = headers or ({"Authorization": "Bearer " + key} if key else {})
    host, port = address.rsplit(":", 1)
    c = connection(host, int(port), 60 * PATIENCE, tls)
    c.request("GET", "/metrics", headers=headers)
    r = c.getresponse()
    assert r.status == 200
    out = {}
    for line in r.read().decode().splitlines():
        if line and not line.startswith("#"):
            key, value = line.rsplit(" ", 1)
            out[key] = float(value)
    c.close()
    return out

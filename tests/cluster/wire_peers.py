"""Drives tests/tools/wire_peer: one kvstore wire per process, commands on stdin, events on stdout."""
import os
import re
import signal
import subprocess
import tempfile
import threading
import time

import pytest

import sanitizer
import starved
from sanitizer import PATIENCE

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def tool():
    build = os.environ.get("BUILD", "build")
    return os.path.join(ROOT, build, "tests", "tools", "wire_peer")


class Peer:
    def __init__(self, name, env=None, machine=None, **opts):
        """machine: of netns.py, to run there."""
        self.name, self.opts = name, opts
        host = machine.rpc_host if machine else "127.0.0.1"
        if machine:
            opts.setdefault("rpc", host + ":0")
        self.lines = []
        self.err = []
        self.killed = False  # its wire process, by a signal of a fault
        self.cond = threading.Condition()
        environ = dict(os.environ)
        environ["ASAN_OPTIONS"] = environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=1"  # for RSS checks
        environ.update({"UCX_LOG_LEVEL": "fatal", **(env or {})})
        args = (machine.within if machine else []) + [tool(), f"name={name}"] + [f"{k}={v}" for k, v in opts.items()]
        self.p = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, bufsize=1, env=environ)
        starved.WATCH.also(self.p.pid, name)
        self.threads = [threading.Thread(target=self._read, args=(self.p.stdout, self.lines)),
                        threading.Thread(target=self._read, args=(self.p.stderr, self.err))]
        for t in self.threads:
            t.daemon = True
            t.start()
        m = self.wait(r"ready port=(\d+) inc=(\w+) pid=(\d+) layout=(\w+)")
        self.port, self.inc, self.pid = int(m[1]), m[2], int(m[3])
        self.layout = int(m[4], 16)
        self.addr = f"{host}:{self.port}"

    def _read(self, stream, into):
        for line in stream:
            with self.cond:
                into.append(line.rstrip("\n"))
                self.cond.notify_all()

    def mark(self):
        with self.cond:
            return len(self.lines)

    def wait(self, pattern, timeout=60, after=0):
        """The first line from number `after` on that matches; fails with the whole output."""
        rx = re.compile(pattern)
        timeout *= PATIENCE
        end = time.monotonic() + timeout
        seen = after
        with self.cond:
            while True:
                while seen < len(self.lines):
                    m = rx.search(self.lines[seen])
                    if m:
                        return m
                    seen += 1
                left = end - time.monotonic()
                if left <= 0 or (self.p.poll() is not None and seen == len(self.lines)):
                    raise AssertionError(f"{self.name}: no /{pattern}/ in {timeout} s\n" +
                                         "\n".join(self.lines[-40:] + self.err[-40:]))
                self.cond.wait(min(left, 0.2))

    def has(self, pattern, after=0):
        rx = re.compile(pattern)
        with self.cond:
            return any(rx.search(x) for x in self.lines[after:])

    def logged(self, *texts, times=1, timeout=60):
        """Waits until so many lines of the log have all these texts: the log comes on a pipe of its own, later or earlier
        than the events on stdout. Returns their number."""
        end = time.monotonic() + timeout * PATIENCE
        with self.cond:
            while True:
                n = sum(all(t in line for t in texts) for line in self.err)
                left = end - time.monotonic()
                if n >= times:
                    return n
                assert left > 0, f"{self.name}: {texts} is in {n} lines of the log, not {times}\n" + "\n".join(self.err[-40:])
                self.cond.wait(min(left, 0.2))

    def say(self, text):
        self.p.stdin.write(text + "\n")
        self.p.stdin.flush()

    def ask(self, text, pattern, timeout=60):
        after = self.mark()
        self.say(text)
        return self.wait(pattern, timeout, after)

    def grant(self, req, epoch, tokens, chunk, seed):
        self.ask(f"grant {req} {epoch} {tokens} {chunk} {seed}", f"granted {req}")

    def recv(self, peer, req, epoch, tokens, chunk, first=0, deadline_ms=0, inc=None, addr=None):
        self.say(f"recv {peer.name} {addr or peer.addr} {inc or peer.inc} {req} {epoch} {tokens} "
                 f"{chunk} {first} {deadline_ms}")

    def fetch(self, peer, req, source, first, n, cls=1, inc=None):
        self.say(f"fetch {peer.name} {peer.addr} {inc or peer.inc} {req} {source} {first} {n} {cls}")

    def usage(self):
        m = self.ask("usage", r"usage cpu_us=(\d+) fds=(\d+) rss_kb=(\d+) free_slots=(\d+)")
        return {"cpu_s": int(m[1]) / 1e6, "fds": int(m[2]), "rss_kb": int(m[3]),
                "free": int(m[4])}

    def metrics(self):
        after = self.mark()
        self.ask("metrics", "metrics_end")
        out = {}
        with self.cond:
            for line in self.lines[after:]:
                if line.startswith("baton_"):
                    key, value = line.rsplit(" ", 1)
                    out[key] = float(value)
        return out

    def wire_pid(self):
        """The wire process that there is now; 0: none."""
        return int(self.ask("usage", r"usage .* wire=(\d+)")[1])

    def signal(self, signo):
        """To the kvstore and its wire process: as if the machine stood still."""
        pids = [self.pid] + children(self.pid)
        for pid in pids if signo != signal.SIGCONT else reversed(pids):
            os.kill(pid, signo)

    def kill(self):
        self.p.kill()
        self.p.wait()

    def stop(self):
        """Ends it in order; its exit status tells of assertions, leaks and sanitizer reports."""
        if self.p.poll() is None:
            self.say("quit")
            try:
                self.p.wait(15 * PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"{self.name} does not end\n" + "\n".join(self.err[-40:]))
        for t in self.threads:
            t.join(5)
        found = sanitizer.in_log("\n".join(self.err), self.killed)
        assert not found, f"{self.name}:\n{found}"
        return self.p.returncode


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(x) for x in f.read().split()]


def tcp_rows():
    """The kernel's TCP sockets, IPv4's and IPv6's (gRPC's are all of these)."""
    rows = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as f:
            rows += [x.split() for x in f.readlines()[1:]]
    return rows


def sockets(pid):
    """Descriptors by the inodes of their sockets."""
    out = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            m = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
        if m:
            out[m[1]] = int(fd)
    return out


def listening_ports(pid):
    """Of the process and its children."""
    inodes = {i for p in [pid, *children(pid)] for i in sockets(p)}
    return {int(r[1].split(":")[1], 16) for r in tcp_rows() if r[3] == "0A" and r[9] in inodes}


class Certificates:
    """A CA in a folder that ends with the object, and certificates of kvstores by their names."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="baton-test-")
        self.made = set()
        self.run("ca")

    def run(self, *args):
        subprocess.run([os.path.join(ROOT, "deploy", "local", "baton-certs"), "--dir", self.folder.name,
                        "--cluster", "test", *args], check=True)

    def of(self, name):
        if name not in self.made:
            self.made.add(name)
            self.run("node", name, "kvstore")
        return self.folder.name


@pytest.fixture(scope="session")
def certificates():
    return Certificates()


TRANSPORTS = ["ucx", "grpc-tls"]


def transport_opts(transport, certificates, name):
    """What makes a peer use this transport."""
    return {} if transport == "ucx" else dict(grpc=1, tls=certificates.of(name))


@pytest.fixture(params=TRANSPORTS)
def peers(request, certificates):
    """make(name, **opts) -> Peer; all that still run end with the test, with exit status 0."""
    made = []

    def make(name, **opts):
        p = Peer(name, **opts, **transport_opts(request.param, certificates, name))
        made.append(p)
        return p

    make.transport = request.param
    yield make
    codes = {p.name: p.stop() for p in made if p.p.returncode is None}
    assert set(codes.values()) <= {0}, codes

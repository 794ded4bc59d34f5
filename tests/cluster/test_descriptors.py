"""File descriptors and strangers. Each daemon runs out of descriptors while strangers dial its ports, and gets descriptors
back: every port then takes connections again. gRPC 1.51 and UCX 1.13 give a listening socket up for good when accept() fails.
And strangers without a certificate do not use a daemon's descriptors up."""
import glob
import os
import resource
import socket
import subprocess
import time

import pytest

from conftest import Cluster, wait_for
from local_cluster import BIN

DIALS = 24  # at each port: more than a daemon has free below its highest descriptor


@pytest.fixture(scope="module")
def cluster():
    c = Cluster("--nodes", "1", "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")
    yield c
    c.stop()


def family(pid):
    """The process and its children: a kvstore has one."""
    out = [pid]
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with open(path) as f:
            for child in f.read().split():
                out += family(int(child))
    return out


def sockets_of(pid):
    """inodes of its open sockets"""
    out = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            out.add(target[len("socket:["):-1])
    return out


def tcp_table():
    """(local port, remote port, state, inode) of every IPv4 and IPv6 socket"""
    for name in "/proc/net/tcp", "/proc/net/tcp6":
        with open(name) as f:
            for line in f.readlines()[1:]:
                w = line.split()
                yield int(w[1].rpartition(":")[2], 16), int(w[2].rpartition(":")[2], 16), w[3], w[9]


def listening(pid):
    """its TCP ports"""
    mine = sockets_of(pid)
    return sorted({port for port, _, state, inode in tcp_table() if state == "0A" and inode in mine})


def taken(port):
    """Does the process behind the port take a connection? One in the backlog has no inode yet."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
        mine = s.getsockname()[1]
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if any(at == port and there == mine and inode != "0" for at, there, state, inode in tcp_table() if state == "01"):
                return True
            time.sleep(0.01)
    return False


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        w = f.read().rpartition(")")[2].split()
    return (int(w[11]) + int(w[12])) / os.sysconf("SC_CLK_TCK")


def without_descriptors(pid, dials, seconds):
    """CPU seconds that the process takes while it has no descriptor to spare; `dials` are made meanwhile."""
    was = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(n) for n in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, was[1]))
    made = []
    try:
        for dial in dials:
            made.append(dial())
        before = cpu_seconds(pid)
        time.sleep(seconds)
        return cpu_seconds(pid) - before
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, was)
        for s in made:
            s.close()


@pytest.mark.parametrize("kind", ["conductor", "prefill", "decode", "kvstore"])
def test_ports_come_back(cluster, kind):
    for pid in family(cluster.daemon(kind)["pid"]):
        ports = listening(pid)
        for port in ports:
            wait_for(lambda p=port: taken(p), 60, f"{kind} takes connections at port {port} to begin with")

        def to(port):
            return lambda: socket.create_connection(("127.0.0.1", port), timeout=60)

        without_descriptors(pid, [to(port) for port in ports for _ in range(DIALS)], 0.5)
        for port in ports:
            wait_for(lambda p=port: taken(p), 60, f"{kind} takes connections at port {port} again")
    wait_for(lambda: cluster.request("GET", "/health")[0] == 200, 60, "the cluster is healthy")
    assert cluster.complete("We few, we happy few", 4)["usage"]["completion_tokens"] == 4


def local_sockets(pid):
    """paths of its listening Unix sockets of packets"""
    mine = sockets_of(pid)
    with open("/proc/net/unix") as f:
        rows = [line.split() for line in f.readlines()[1:]]
    return [w[7] for w in rows if len(w) == 8 and w[6] in mine and w[3] == "00010000" and w[4] == "0005"]


def test_no_spinning(cluster):
    """A worker that finds no room at its kvstore's socket waits; the kvstore does not turn in circles meanwhile."""
    pid = cluster.daemon("kvstore")["pid"]
    path, = local_sockets(pid)

    def dial():
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            s.connect(path)
        except BlockingIOError:
            pass  # its backlog is full
        return s

    used = without_descriptors(pid, [dial] * (2 * DIALS), 2)
    assert used < 1, f"{used} s of CPU in 2 s"
    wait_for(lambda: cluster.request("GET", "/health")[0] == 200, 60, "the cluster is healthy")
    assert cluster.complete("We few, we happy few", 4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plaintext"])
def test_strangers_at_a_grpc_port(tls):
    """1,500 connections that say nothing, to a daemon that may have 1,024 descriptors: others notice nothing."""
    c = Cluster("--nodes", "1", *(["--tls", "--set", "conductor.conductor.http.tls="] if tls else []))
    strangers = []
    try:
        for kind in "conductor", "kvstore", "decode":
            daemon = c.daemon(kind)
            resource.prlimit(daemon["pid"], resource.RLIMIT_NOFILE, (1024, 1024))
            for port in listening(daemon["pid"]):
                if port != c.port:
                    strangers += [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(500)]
            assert len(os.listdir(f"/proc/{daemon['pid']}/fd")) < 700, f"{kind} keeps strangers' connections"
        assert len(strangers) >= 1500
        assert c.complete("We few, we happy few", 4)["usage"]["completion_tokens"] == 4
        p = subprocess.run([os.path.join(BIN, "batonctl"), "--dir", c.state_dir, "status"], stdout=subprocess.PIPE,
                           timeout=60)
        assert p.returncode == 0
        assert "worker_lost" not in c.logs()
    finally:
        for s in strangers:
            s.close()
        c.stop()

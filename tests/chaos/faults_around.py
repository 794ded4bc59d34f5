"""Faults of etcd, conductors and the network, and what strangers and clients do."""
import base64
import json
import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time

from cluster import BUILD, KEYS, NODES, PATIENCE, wait_for
from fault import Background, a_worker, fault, healthy, listening, restart, slow
from load import Broken, Refused
from net import MAIN


@fault([22], "etcd")
def etcd_stopped(x):
    d = x.cluster.etcd()
    seconds = x.rng.choice([2, 8])
    x.note(f"{seconds} s")
    d.signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        d.signal(signal.SIGCONT)


@fault([22, 24], "etcd")
def etcd_killed(x):
    """Its watches break; while it is away, or at once when it is back, history is compacted under them."""
    d = x.cluster.etcd()
    d.kill()
    time.sleep(x.rng.uniform(0, 5))
    d.start_again()
    compact(x)


def compact(x):
    def done():
        try:
            revision = x.cluster.etcd_call("kv/range", {"key": "AA=="})["header"]["revision"]
            x.cluster.etcd_call("kv/compaction", {"revision": revision, "physical": True})
            return True
        except OSError as e:  # also: it is compacted already
            return "compacted" in getattr(e, "read", lambda: b"")().decode(errors="replace")

    wait_for(done, 20, "etcd compacts")


@fault([24], "etcd")
def etcd_compacted(x):
    compact(x)


@fault([23], "etcd")
def etcd_slow(x):
    slow(x, x.cluster.etcd(), 0.4)


@fault([25], "etcd")
def lease_revoked(x):
    """A daemon that lives loses its lease: it says so, and is a member again."""
    prefix = f"/baton/{x.cluster.cluster_name}/members/"

    def members():
        r = x.cluster.etcd_call("kv/range", {"key": base64.b64encode(prefix.encode()).decode(),
                                             "range_end": base64.b64encode((prefix[:-1] + "0").encode()).decode(), "keys_only": True})
        return {base64.b64decode(k["key"]).decode()[len(prefix):]: k["lease"] for k in r["kvs"]}

    before = members()
    name = x.rng.choice(sorted(before))
    x.note(name)
    x.cluster.etcd_call("lease/revoke", {"ID": before[name]})
    wait_for(lambda: members().get(name) not in (None, before[name]), 15, f"{name} registers again")


# ---- conductors ----

@fault([26], "conductor")
def conductor_killed(x):
    """Its streams break without [DONE]; the other one goes on."""
    c = x.rng.choice(x.cluster.conductors())
    x.note(c.daemon.name)
    away = [time.monotonic(), None, True]
    c.away.append(away)
    c.daemon.kill()
    restart(x, c.daemon)
    wait_for(lambda: healthy(c), 30, "it serves again")
    away[1] = time.monotonic()


@fault([27], "conductor")
def conductor_drained(x):
    """It takes nothing new, and all that it has ends well."""
    c = x.rng.choice(x.cluster.conductors())
    x.note(c.daemon.name)
    away = [time.monotonic(), None, False]
    c.away.append(away)
    d = c.daemon
    d.planned = True
    d.signal(signal.SIGTERM)
    wait_for(lambda: not d.alive(), 40, f"{d.name} ends after SIGTERM")
    d.reap()
    restart(x, d)
    wait_for(lambda: healthy(c), 30, "it serves again")
    away[1] = time.monotonic()


# ---- the network ----

def network(x, seconds):
    """For so long; then all rules are gone."""
    for d in x.cluster.kind("prefill", "decode"):
        d.lost()
    try:
        time.sleep(seconds)
    finally:
        x.net.heal()
        for d in x.cluster.kind("prefill", "decode"):
            d.lost()


@fault([28, 29], "net prefill decode kvstore", "net")
def nodes_parted(x):
    """All frames between two nodes are lost, both ways; one of them, or both, have a conductor."""
    a, b = x.rng.choice([("n1", "n2"), ("n1", "n3"), ("n2", "n3")])
    x.note(f"{a} and {b}")
    x.net.cut(a, b)
    network(x, x.rng.uniform(1, 8))


@fault([30], "net prefill decode kvstore", "net")
def nodes_parted_one_way(x):
    a, b = x.rng.sample(NODES, 2)
    x.note(f"{a} to {b}")
    x.net.rule(a, b, loss=1)
    network(x, x.rng.uniform(1, 8))


@fault([22, 30], "net etcd", "net")
def node_without_etcd(x):
    node = x.rng.choice(NODES)
    with open(os.path.join(x.cluster.state, "etcd.addr")) as f:
        port = f.read().strip().rsplit(":", 1)[1]
    x.note(node)
    x.net.both(node, MAIN, loss=1, port=port)
    network(x, x.rng.uniform(2, 8))


@fault([31], "net prefill decode kvstore", "net")
def swizzle(x):
    """Nodes are cut off from the others one after another, and come back in another order."""
    order = x.rng.sample(NODES, 3)
    cut = []
    try:
        for n in order:
            cut.append(n)
            apply_cuts(x, cut)
            time.sleep(x.rng.uniform(0.2, 1))
        x.rng.shuffle(cut)
        while cut:
            cut.pop()
            apply_cuts(x, cut)
            time.sleep(x.rng.uniform(0.2, 1))
    finally:
        network(x, 0)


def apply_cuts(x, cut):
    for d in x.cluster.kind("prefill", "decode"):
        d.lost()
    x.net.heal()
    for n in cut:
        for other in NODES:
            if other != n:
                x.net.cut(n, other)


@fault([32], "net", "net")
def frames_lost(x):
    """Lost, repeated, out of order, between all nodes."""
    loss = x.rng.choice([0.01, 0.05, 0.2])
    x.note(f"{loss:.0%}")
    for a in NODES:
        for b in NODES:
            if a != b:
                x.net.rule(a, b, loss=loss, dup=0.02, reorder=0.1)
    network(x, x.rng.uniform(2, 6))


@fault([33], "net", "net")
def slow_network(x):
    """200 ms each way, or 10 Mbit/s."""
    how = x.rng.choice([{"delay": 200}, {"rate": 10000}, {"rate": 10000, "delay": 50}])
    x.note(str(how))
    a, b = x.rng.sample(NODES, 2)
    x.net.both(a, b, **how)
    network(x, x.rng.uniform(2, 6))


@fault([34], "net", "net")
def connections_reset(x):
    """RST in the middle of data, between nodes."""
    for a in NODES:
        for b in NODES:
            if a != b:
                x.net.rule(a, b, rst=0.01)
    network(x, x.rng.uniform(0.5, 3))


@fault([34], "net", "net")
def large_frames_lost(x):
    """An MTU hole: what is small passes, what is large vanishes without a word."""
    a, b = x.rng.sample(NODES, 2)
    x.note(f"{a} and {b}")
    x.net.both(a, b, mtu=600)
    network(x, x.rng.uniform(2, 6))


@fault([34], "net decode", "net")
def half_open(x):
    """A worker is killed behind a cut, so that nobody hears of it; another is there when the cut is gone."""
    d = a_worker(x, "decode")
    x.note(d.name)
    for n in NODES:
        if n != d.node:
            x.net.cut(d.node, n)
    for w in x.cluster.kind("prefill", "decode"):
        w.lost()
    d.kill()
    d.spawn()
    network(x, x.rng.uniform(1, 4))
    if not d.alive():
        d.reap()
        d.spawn()
    d.start_again() if not d.alive() else wait_for(lambda: d.ready(), 30, f"{d.name} is ready")
    d.planned = False


# ---- strangers and clients ----

@fault([9], "client")
def bad_requests(x):
    """Prompts longer than the context, and other requests that cannot be: 400 at once, and nothing of a worker."""
    cases = [c for c in x.load.cases if c.expect == 400]
    for _ in range(10):
        c = x.rng.choice(cases)
        for b in [Background(x, c2, c, stream=x.rng.random() < 0.5) for c2 in x.cluster.conductors()]:
            got = b.wait(30)
            if isinstance(got, Exception) and not isinstance(got, (Refused, Broken)):
                raise AssertionError(f"{c.name}: {got!r}")


@fault([35], "stranger")
def strangers(x):
    """Bytes of nobody's protocol, and connections without a certificate, at every port of gRPC and HTTP."""
    http2, hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"\x16\x03\x01\x02\x00\x01\x00"
    for d in x.cluster.daemons:
        if d.kind == "etcd":
            continue
        for key in "rpc", "http":
            host, port = d.address(key)
            for data in http2, x.rng.randbytes(400), hello + x.rng.randbytes(200):
                try:
                    with socket.create_connection((host, port), timeout=2) as s:
                        s.sendall(data)
                        s.settimeout(0.05)
                        s.recv(100)
                except OSError:
                    pass
    p = subprocess.run([os.path.join(BUILD, "bin", "batonctl"), "--addr", "%s:%d" % x.cluster.a.daemon.address("rpc"), "status"],
                       env={k: v for k, v in os.environ.items() if k != "BATON_TLS"} | {"XDG_RUNTIME_DIR": "/nonexistent"},
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    if p.returncode != 1:
        raise AssertionError(f"batonctl without a certificate: {p.returncode} {p.stdout[:300]}")


@fault([35], "stranger kvstore")
def strangers_at_the_wire(x):
    """Bytes of nobody's protocol at every port that a kvstore listens on, UCX's included."""
    d = a_worker(x, "kvstore")
    x.note(d.name)
    host, _ = d.address("rpc")
    for port in listening(d.family()):
        for size in 1, 8, 64, 1000, 20000:
            try:
                with socket.create_connection((host, port), timeout=2) as s:
                    s.sendall(x.rng.randbytes(size))
                    time.sleep(0.05)
            except OSError:
                pass


@fault([43], "client")
def clients_slow_and_gone(x):
    """Readers of 200 bytes at a time for some seconds, and clients that leave without a word: their requests end with them."""
    case = next(c for c in x.load.cases if c.name == "long answer")
    slow_ones = [Background(x, x.rng.choice(x.cluster.conductors()), case, slowly=x.rng.uniform(2, 6)) for _ in range(4)]
    for _ in range(20):
        c = x.rng.choice(x.cluster.conductors())
        body = json.dumps(dict(case.body, stream=True)).encode()
        try:
            s = socket.create_connection((c.host, c.port), timeout=5)
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer " +
                      KEYS["beta"].encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:x.rng.choice([len(body), 20])])
            time.sleep(x.rng.uniform(0, 0.2))
            if x.rng.random() < 0.5:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with RST
            s.close()
        except OSError:
            pass
    for b in slow_ones:
        b.must_equal()


@fault([44], "client")
def slowloris(x):
    """Hundreds of connections that never finish a header, and a storm of resets."""
    c = x.rng.choice(x.cluster.conductors())
    sockets = []
    try:
        for _ in range(400):
            s = socket.create_connection((c.host, c.port), timeout=5)
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost")
            sockets.append(s)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            with socket.create_connection((c.host, c.port), timeout=5) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for s in x.rng.sample(sockets, 20):
                s.sendall(b":")
    except OSError:
        pass  # it may cut them off
    finally:
        for s in sockets:
            s.close()


@fault([39, 45], "client overload")
def overload(x):
    """Ten times the clients for some seconds: whoever is refused is refused at once and told when to come back."""
    x.load.generous(15)
    cases = [c for c in x.load.cases if c.expect == 200]
    end = time.monotonic() + x.rng.uniform(2, 4)
    rngs = [random.Random(f"{x.seed} {i}") for i in range(50)]

    def flood(rng):
        while time.monotonic() < end:
            x.load.one(rng.choice(cases), rng.choice(sorted(KEYS)), rng.random() < 0.7, rng.randrange(2), f"flood {rng.random()}", None)

    threads = [threading.Thread(target=flood, args=(r,), daemon=True) for r in rngs]
    for t in threads:
        t.start()
    for t in threads:
        t.join(90 * PATIENCE)
        x.load.generous(15)
    if any(t.is_alive() for t in threads):
        raise AssertionError("requests of the overload are still open 90 s later")

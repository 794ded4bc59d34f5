"""Damaged bytes at every TLS port of a running cluster: handshakes first, then HTTP/2 frames and messages of our
protocols behind a good handshake, with a certificate of the cluster whose role may not call there. Daemons live on and
answer. BATON_GARBAGE_SECONDS makes it longer, BATON_GARBAGE_SEED repeats a run."""
import os
import random
import socket
import ssl
import time

import pytest

from conftest import Cluster

SECONDS = float(os.environ.get("BATON_GARBAGE_SECONDS", "6"))
SEED = int(os.environ.get("BATON_GARBAGE_SEED", "0")) or random.SystemRandom().getrandbits(32)
PROMPT = "ROMEO: what light through yonder window breaks?"
METHODS = ["/baton.Peer/Session", "/baton.Peer/Segments", "/baton.Kvstore/Session", "/baton.Kvstore/Blocks", "/baton.Worker/Session",
           "/baton.Admin/Status", "/baton.Admin/Drain", "/nobody/Here"]


@pytest.fixture(scope="module")
def secure():
    c = Cluster("--tls", "--set", "kvstore.wire.transport=grpc")
    yield c
    c.stop()


def listeners(pid):
    """TCP ports on which the process listens."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            to = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue  # closed meanwhile
        if to.startswith("socket:["):
            inodes.add(to[8:-1])
    rows = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{name}") as f:
            rows += [line.split() for line in f.readlines()[1:]]
    return [int(r[1].split(":")[1], 16) for r in rows if r[3] == "0A" and r[9] in inodes]


def client(tls, name):
    ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ctx.check_hostname = False
    ctx.load_verify_locations(os.path.join(tls, "ca.crt"))
    ctx.load_cert_chain(os.path.join(tls, name + ".crt"), os.path.join(tls, name + ".key"))
    ctx.set_alpn_protocols(["h2"])
    return ctx


def client_hello(ctx):
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        ctx.wrap_bio(into, out).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


def damage(r, data):
    data = bytearray(data)
    for _ in range(r.choice([0, 1, 1, 2, 5])):
        kind, at = r.randrange(4), r.randrange(len(data) + 1)
        if kind == 0 and at < len(data):
            data[at] = r.randrange(256)
        elif kind == 1:
            data[at:at] = r.randbytes(r.randrange(1, 20))
        elif kind == 2:
            del data[at:at + r.randrange(1, 20)]
        else:
            data[at:] = r.randbytes(r.randrange(64))
    return bytes(data)


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def call(r, stream):
    """The frames of one gRPC call: headers as literals, then messages."""
    fields = [(":method", "POST"), (":scheme", "https"), (":path", r.choice(METHODS)), (":authority", "x"),
              ("content-type", "application/grpc"), ("te", "trailers")]
    block = b"".join(b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields)
    out = frame(1, 4, stream, block)
    for _ in range(r.randrange(4)):
        message = r.choice([b"", bytes([r.choice([10, 18, 26, 34]), 4, 8, 1, 16, 7]), r.randbytes(r.randrange(80))])
        out += frame(0, 0, stream, b"\0" + len(message).to_bytes(4, "big") + message)
    return out


def send(port, data, ctx=None):
    """Sends it on a connection of its own and waits a moment for what the other side says. False: it was not taken."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        sent = False
        try:
            s = ctx.wrap_socket(raw) if ctx else raw
            s.sendall(data)
            sent = True
            raw.settimeout(0.2)
            s.recv(4096)
        except (OSError, ssl.SSLError):
            pass  # refused, or it waits for the rest
        return sent


def test_daemons_live_through_garbage(secure):
    r = random.Random(SEED)
    tls = os.path.join(secure.state_dir, "tls")
    daemons = [d for d in secure.status() if d["daemon"] != "etcd"]
    ports = {d["pid"]: [p for p in listeners(d["pid"]) if str(p) != d["http"].rsplit(":", 1)[1]] for d in daemons}
    assert all(ports.values()), (daemons, ports)
    shaking = [p for ps in ports.values() for p in ps] + [secure.port]  # the last one is HTTPS
    before = secure.complete(PROMPT, 24)["choices"][0]["text"]
    # admin may call conductors only, a prefill worker's role nobody's services.
    clients = [client(tls, "admin"), client(tls, "n1-prefill")]
    hello = client_hello(clients[0])
    counts, end = [0, 0], time.monotonic() + SECONDS
    while time.monotonic() < end or min(counts) < 3 and time.monotonic() < end + 60:  # a busy machine gets few of them through
        port = r.choice([p for ps in ports.values() for p in ps])
        if r.random() < 0.4:
            send(r.choice(shaking), damage(r, hello))
            counts[0] += 1
        else:
            calls = b"".join(call(r, 1 + 2 * i) for i in range(r.randrange(1, 4)))
            counts[1] += send(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + damage(r, frame(4, 0, 0, b"") + calls), r.choice(clients))
    print(f"seed={SEED} handshakes={counts[0]} connections={counts[1]}")
    assert min(counts) > 0, counts
    for d in daemons:
        assert os.path.exists(f"/proc/{d['pid']}"), f"seed {SEED}: {d} is gone\n{secure.logs()}"
    # Who is busy with strangers answers members all the same.
    assert secure.complete(PROMPT, 24)["choices"][0]["text"] == before, SEED
    assert [d["pid"] for d in secure.status() if d["daemon"] != "etcd"] == [d["pid"] for d in daemons], SEED

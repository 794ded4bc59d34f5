"""The wire against peers that break its rules. The gRPC side is played here: as a peer of its own, or
as a proxy between two real ones that holds back, cuts or adds messages."""
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures

import pytest

from sanitizer import PATIENCE
from wire_peers import ROOT, Peer, sockets, tcp_rows, tool

grpc = pytest.importorskip("grpc")
METHOD = "/baton.Peer/Session"
WAIT_S = 60 * PATIENCE  # only what hangs takes so long


def load_proto():
    out = tempfile.mkdtemp(prefix="baton-wire-proto-")
    subprocess.run(["protoc", f"--proto_path={ROOT}/proto", f"--python_out={out}", "peer.proto"],
                   check=True)
    sys.path.insert(0, out)
    import peer_pb2
    return peer_pb2


pb = load_proto()


class Server:
    """A gRPC server with one method; session(requests) yields messages as bytes."""

    def __init__(self, session):
        handler = grpc.method_handlers_generic_handler(
            "baton.Peer", {"Session": grpc.stream_stream_rpc_method_handler(
                lambda requests, context: session(requests, context))})
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        self.server.add_generic_rpc_handlers((handler,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.addr = f"127.0.0.1:{self.port}"
        self.server.start()

    def stop(self):
        self.server.stop(None)


class Fake:
    """A listener played by the test: collects what arrives, sends what it is told, and a heartbeat whenever it was silent for a
    moment: two seconds of silence end a session, and a busy machine may need them for a test."""

    def __init__(self, name, like):
        self.name, self.like = name, like
        self.inc = f"{random.getrandbits(63) | 1:016x}"
        self.got, self.out = queue.Queue(), queue.Queue()
        self.grpc = Server(self.session)
        self.addr = self.grpc.addr

    def session(self, requests, context):
        def read():
            try:
                for data in requests:
                    self.got.put(pb.PeerMsg.FromString(data))
            except grpc.RpcError:
                pass
            self.out.put(None)
        threading.Thread(target=read, daemon=True).start()
        said_hello = False
        while True:
            try:
                msg = self.out.get(timeout=0.3 if said_hello else None)
            except queue.Empty:
                msg = pb.PeerMsg(heartbeat=pb.PeerHeartbeat(seq=1))
            if msg is None:
                return
            said_hello = True
            yield msg if isinstance(msg, bytes) else msg.SerializeToString()

    def expect(self, kind):
        end = time.monotonic() + WAIT_S
        while True:
            msg = self.got.get(timeout=max(0.01, end - time.monotonic()))
            if msg.WhichOneof("m") == kind:
                return getattr(msg, kind)

    def hello(self, address, nonce, **changes):
        h = pb.PeerHello(version=1, cluster="test", name=self.name, incarnation=int(self.inc, 16),
                         layout_id=self.like.layout, root_key=bytes([1]) + bytes([7]) * 31,
                         ucx_address=address, nonce=nonce)
        for k, v in changes.items():
            setattr(h, k, v)
        self.out.put(pb.PeerMsg(hello=h))


class Evil:
    """tests/tools/wire_evil: the UCX side of a bad peer."""

    def __init__(self):
        path = tool().replace("wire_peer", "wire_evil")
        self.p = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                  bufsize=1, env=dict(os.environ, UCX_LOG_LEVEL="fatal"))
        self.address = bytes.fromhex(self.p.stdout.readline().split()[1])

    def ask(self, text):
        self.p.stdin.write(text + "\n")
        self.p.stdin.flush()
        return self.p.stdout.readline()

    def stop(self):
        self.p.kill()
        self.p.wait()


@pytest.fixture
def world():
    """A real receiver b, a real sender c that must go on in all cases."""
    b, c = Peer("b"), Peer("c")
    c.ask("auto 64 32 8", "auto")
    other = []
    yield b, c, other
    assert c.p.poll() is None, "\n".join(c.err)
    after = b.mark()
    b.say(f"storm c {c.addr} {c.inc} 500 20 64 32 8 1")
    b.wait("storm done=20 failed=0", after=after)
    for x in other:
        x.stop()
    assert [b.stop(), c.stop()] == [0, 0]


def bad_session(world, tokens=64, chunk=32):
    """b pulls flow 1 from an evil peer; returns it, proved and with its FlowOpen."""
    b, c, other = world
    fake, evil = Fake("a", b), Evil()
    other += [evil, fake.grpc]
    b.recv(fake, 1, 1, tokens, chunk)
    hello = fake.expect("hello")
    fake.address_of_b = hello.ucx_address.hex()
    # Its proof first, as it may come: a session that is not proved within a second of its hello is none.
    evil.ask(f"connect {hello.ucx_address.hex()} {hello.nonce}")
    fake.hello(evil.address, random.getrandbits(63))
    return b, fake, evil, fake.expect("flow_open")


def dropped(b, reason):
    return b.metrics()[f'baton_kv_dropped_messages_total{{reason="{reason}"}}']


def wait_dropped(b, reason):
    end = time.monotonic() + WAIT_S
    while dropped(b, reason) != 1:
        assert time.monotonic() < end, f"nothing was dropped as {reason}"
        time.sleep(0.01)


@pytest.mark.parametrize("what,why", [
    ("seg request=1 flip=1", "header checksum"),
    ("seg request=1 cut=4", "number of segments"),
    ("seg request=1 cut=30", "header is too short"),
    ("seg request=1 nonce=1", "nonce"),
    ("seg request=1 n=300 bytes=8192", "number of segments"),
    ("seg request=1 n=0 bytes=0", "number of segments"),
    ("seg request=1 item=8", "item is beyond"),
    ("seg request=1 item=4000000000", "item is beyond"),
    ("seg request=1 first=2", "outside"),
    ("seg request=1 item=4 first=0", "outside"),
    ("seg request=1 n=3", "outside"),
    ("seg request=1 first=4294967295", "outside"),
    ("seg request=1 bytes=8191", "payload length"),
    ("seg request=1 n=2 bytes=8192", "payload length"),
    ("seg request=1 bytes=2000000 rndv=1", "payload length"),
    ("seg request=1 seg=4096", "payload length"),
])
def test_garbled_messages_close_the_peer(world, what, why):
    b, fake, evil, op = bad_session(world)
    evil.ask(f"{what} stream={op.stream}")
    b.wait(f"failed 1 ERR_PEER_LOST .*{why}")
    b.wait("quiet 1")
    wait_dropped(b, "garbled")
    assert b.ask("word 1", r"word 1 (\d+)")[1] == "0"
    b.ask("poison 1", "poisoned 1")
    evil.ask(f"seg request=1 stream={op.stream}")
    time.sleep(0.2)
    b.ask("checkpoison 1", "poison_changed 1 0$")


def test_duplicate_closes_the_peer(world):
    b, fake, evil, op = bad_session(world)
    # zeros with CRC 0 are not what segment_crc says: the flow fails, once; the second is stale
    evil.ask(f"seg request=1 stream={op.stream}")
    b.wait("failed 1 ERR_DATA_LOSS")
    b.wait("quiet 1")
    assert b.metrics()["baton_kv_crc_errors_total"] == 1


@pytest.mark.parametrize("what,reason", [
    ("seg request=1 stream=77", "unknown_stream"), ("seg request=2 stream={s}", "stale"),
    ("seg request=1 epoch=2 stream={s}", "stale"), ("seg request=1 stream=77 rndv=1", "unknown_stream")])
def test_other_flows_messages_are_dropped(world, what, reason):
    b, fake, evil, op = bad_session(world)
    evil.ask(what.format(s=op.stream))
    wait_dropped(b, reason)
    assert not b.has("failed 1") and b.ask("word 1", r"word 1 (\d+)")[1] == "0"
    b.ask("cancel 1", "quiet 1")


@pytest.mark.parametrize("am", [0, 3, 9, 63, 64, 65, 100, 127, 128, 1000])
def test_messages_that_nobody_handles(world, am):
    b, fake, evil, op = bad_session(world)
    evil.ask(f"seg id={am} request=1 stream={op.stream}")
    evil.ask(f"seg request=2 stream={op.stream}")  # what comes behind it over the same connection is read
    wait_dropped(b, "stale")
    assert not b.has("failed 1")
    b.ask("cancel 1", "quiet 1")


def test_a_stranger_on_the_ucx_port_is_ignored(world):
    """Someone else connects to the same UCX worker: no nonce, no harm."""
    b, fake, evil, op = bad_session(world)
    stranger = Evil()
    world[2].append(stranger)
    stranger.ask(f"connect {fake.address_of_b} 4711")
    stranger.ask(f"seg request=1 stream={op.stream}")
    time.sleep(0.3)
    assert not b.has("failed 1")
    b.ask("cancel 1", "quiet 1")


def test_peer_stopped_before_wire_up(world):
    """Its worker's address is real, its process is stopped: wire-up never ends, and epoll would spin."""
    b, c, other = world
    p, bait = Peer("p"), Evil()
    other.append(bait)  # any valid UCX address makes p open a worker for us
    hello = pb.PeerHello(version=1, cluster="test", name="x", incarnation=5, layout_id=b.layout,
                         root_key=bytes([1]) + bytes([7]) * 31, ucx_address=bait.address,
                         nonce=1)
    with grpc.insecure_channel(p.addr) as ch:
        stop = threading.Event()

        def talk():
            yield pb.PeerMsg(hello=hello).SerializeToString()
            stop.wait(WAIT_S)
        answer = pb.PeerMsg.FromString(next(iter(ch.stream_stream(METHOD)(talk()))))
        p.signal(signal.SIGSTOP)
        fake = Fake("a", b)
        other.append(fake.grpc)
        before = b.usage()["cpu_s"]
        b.recv(fake, 1, 1, 64, 32)
        fake.expect("hello")
        fake.hello(answer.hello.ucx_address, 7)
        b.wait("failed 1 ERR_PEER_LOST")
        b.wait("quiet 1")
        b.logged("did not prove its session within a second")
        assert b.usage()["cpu_s"] - before < 0.4
        p.signal(signal.SIGCONT)
        stop.set()
    p.stop()


class Proxy:
    """Between a dialer and a real listener; hook(direction, PeerMsg) returns messages to pass on."""

    def __init__(self, peer, hook):
        self.peer, self.hook = peer, hook
        self.name, self.inc = peer.name, peer.inc
        self.channel = grpc.insecure_channel(peer.addr)
        self.calls = []
        self.grpc = Server(self.session)
        self.addr = self.grpc.addr

    def session(self, requests, context):
        def up():
            try:
                for data in requests:
                    yield from self.pass_on("up", data)
            except grpc.RpcError:
                return
        call = self.channel.stream_stream(METHOD)(up())
        self.calls.append(call)
        context.add_callback(call.cancel)
        try:
            for data in call:
                yield from self.pass_on("down", data)
        except grpc.RpcError as e:
            context.abort(e.code(), e.details())

    def pass_on(self, way, data):
        for m in self.hook(way, pb.PeerMsg.FromString(data)):
            yield m if isinstance(m, bytes) else m.SerializeToString()

    def stop(self):
        self.grpc.stop()
        self.channel.close()


def through_proxy(world, hook):
    b, c, other = world
    a = Peer("a")
    proxy = Proxy(a, hook)
    other += [proxy, a]
    a.grant(1, 1, 64, 32, 5)
    b.recv(proxy, 1, 1, 64, 32)
    return a, b, proxy


def test_echo_overtakes_the_hello(world):
    def hook(way, m):
        if way == "down" and m.WhichOneof("m") == "hello":
            time.sleep(0.4)
        yield m
    a, b, proxy = through_proxy(world, hook)
    a.wait("lookup 1")
    a.say("raise 1 8")
    a.say("trailer 1 1 0")
    b.wait("done 1")


def test_silence_ends_the_session(world):
    """Everything but heartbeats would go on; the UCX endpoint too."""
    silent = threading.Event()  # not before the flow runs: a busy machine may take two seconds for that

    def hook(way, m):
        if m.WhichOneof("m") != "heartbeat" or not silent.is_set():
            yield m
    a, b, proxy = through_proxy(world, hook)
    a.say("raise 1 3")
    b.wait("progress 1 3")
    silent.set()
    # Whoever notices first ends both; the other may learn of it from UCX before gRPC.
    b.wait("failed 1 ERR_PEER_LOST .*(nothing was heard|stream ended|UCX)")
    b.wait("quiet 1")
    a.wait("send_end 1 ERR_PEER_LOST")
    wait_for(lambda: any("nothing was heard for" in x for p in (a, b) for x in p.err), "one of them says why")


def test_broken_grpc_stream_closes_the_endpoint(world):
    a, b, proxy = through_proxy(world, lambda way, m: [m])
    a.say("raise 1 3")
    b.wait("progress 1 3")
    for call in proxy.calls:
        call.cancel()
    b.wait("failed 1 ERR_PEER_LOST")
    b.wait("quiet 1")
    a.wait("send_end 1 ERR_PEER_LOST")
    b.ask("poison 1", "poisoned 1")
    a.say("raise 1 8")
    time.sleep(0.3)
    b.ask("checkpoison 1", "poison_changed 1 0$")


def test_garbage_on_the_session(world):
    def hook(way, m):
        yield m
        if way == "down" and m.WhichOneof("m") == "hello":
            yield b"\xff\xff\xff\xff garbage"
    a, b, proxy = through_proxy(world, hook)
    b.wait("failed 1 ERR_PEER_LOST")
    b.logged("PeerMsg of 12 bytes cannot be unpacked")
    b.wait("quiet 1")


def test_a_trailer_does_not_finish_a_flow_that_has_not_landed(world):
    def hook(way, m):
        yield m
        if way == "up" and m.WhichOneof("m") == "flow_open":
            hook.stream = m.flow_open.stream
        if way == "down" and m.WhichOneof("m") == "heartbeat" and hasattr(hook, "stream"):
            yield pb.PeerMsg(flow_trailer=pb.FlowTrailer(stream=hook.stream, first_token=3))
    a, b, proxy = through_proxy(world, hook)
    a.say("raise 1 7")
    b.wait("progress 1 7")
    time.sleep(1.2)
    assert not b.has("done 1")
    a.say("raise 1 8")
    b.wait("done 1 token=3")


# ---- fetches ----

def fetch_through_proxy(world, hook):
    b, c, other = world
    a = Peer("a")
    proxy = Proxy(a, hook)
    other += [proxy, a]
    a.grant(1, 1, 64, 32, 5)
    free = b.usage()["free"]
    b.fetch(proxy, 700, 1, 0, 4)
    return a, b, proxy, free


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way,kind", [("up", "hello"), ("down", "hello"), ("up", "flow_open"),
                                      ("down", "flow_offer"), ("up", "flow_take"), ("up", "flow_close")])
def test_fetch_cut_at_every_message(world, way, kind, after):
    """Cut before or behind each message of a fetch: it ends on both sides, or is whole, and nothing is kept."""
    cut = []

    def hook(w, m):
        hit = w == way and m.WhichOneof("m") == kind and not cut
        if hit and not after:
            cut.append(1)
            proxy_of[0].calls[0].cancel()
            return
        yield m
        if hit:
            cut.append(1)
            proxy_of[0].calls[0].cancel()

    b, c, other = world
    a = Peer("a")
    proxy_of = [Proxy(a, hook)]
    other += [*proxy_of, a]
    a.grant(1, 1, 64, 32, 5)
    free = b.usage()["free"]
    b.fetch(proxy_of[0], 700, 1, 0, 4)
    b.wait(r"quiet 700$")
    end = time.monotonic() + WAIT_S
    while not cut:  # the last message may still be on its way through the proxy
        assert time.monotonic() < end
        time.sleep(0.01)
    # A session that never came up is dialled again, and the fetch is whole then. Cut behind a hello it may
    # have come up: the hello and the end of the call travel at the same time.
    whole = b.has("done 700 ")
    assert whole != b.has("failed 700 ERR_PEER_LOST")
    if whole:
        b.ask("verify 700 5", "verify 700 bad=0 crc_bad=0")
    else:
        assert kind != "hello" or after
    b.say("forget 700")
    assert b.usage()["free"] == free
    if a.has("wanted 700"):
        a.wait("want_end")


@pytest.mark.parametrize("have", [b"", bytes(4), b"\1\1\1", b"\1" * 5])
def test_offer_that_does_not_fit(world, have):
    def hook(way, m):
        if m.WhichOneof("m") == "flow_offer":
            m.flow_offer.have = have
        yield m
    a, b, proxy, free = fetch_through_proxy(world, hook)
    b.wait("failed 700 ERR_PEER_LOST .*FlowOffer")
    b.wait("quiet 700$")
    a.wait("want_end")


def test_offer_of_what_the_sender_lacks(world):
    """It says more than it has: the flow never gets whole, and ends with whoever waits for it."""
    def hook(way, m):
        if m.WhichOneof("m") == "flow_offer":
            m.flow_offer.have = b"\1\1\1\1"
        yield m
    b, c, other = world
    a = Peer("a")
    proxy = Proxy(a, hook)
    other += [proxy, a]
    a.grant(1, 1, 32, 32, 5)  # two of the four
    b.fetch(proxy, 700, 1, 0, 4)
    b.wait("offer 700 1111")
    time.sleep(0.3)
    if not b.has("failed 700"):
        b.say("cancel 700")
    b.wait("quiet 700$")
    assert not b.has("done 700")
    a.wait("want_end")


@pytest.mark.parametrize("twice", ["flow_offer", "flow_take"])
def test_fetch_message_that_comes_twice(world, twice):
    def hook(way, m):
        yield m
        if m.WhichOneof("m") == twice:
            yield m
    a, b, proxy, free = fetch_through_proxy(world, hook)
    b.wait(r"quiet 700$")
    a.wait("want_end")


@pytest.mark.parametrize("n,ok", [(1, True), (31, False), (33, False), (32 * 4097, False)])
def test_fetch_of_malformed_keys(world, n, ok):
    def hook(way, m):
        if m.WhichOneof("m") == "flow_open":
            m.flow_open.keys = bytes(n if not ok else 32)
        yield m
    a, b, proxy, free = fetch_through_proxy(world, hook)
    b.wait("failed 700 ERR_NOT_FOUND" if ok else "failed 700 ERR_PEER_LOST")
    b.wait("quiet 700$")


def test_messages_of_unknown_fetches_are_ignored(world):
    def hook(way, m):
        kind = m.WhichOneof("m")
        if way == "down" and kind == "flow_offer":
            yield pb.PeerMsg(flow_offer=pb.FlowOffer(stream=99, have=b"\1"))
        if way == "up" and kind == "flow_take":
            yield pb.PeerMsg(flow_take=pb.FlowTake(stream=99))
        yield m
    a, b, proxy, free = fetch_through_proxy(world, hook)
    b.wait("done 700 ")
    b.ask("verify 700 5", "verify 700 bad=0 crc_bad=0")


# ---- addresses are taken from members only ----

SECRET = "a secret of the cluster, 32 bytes"


def refused(world, change, secret=SECRET):
    """A dialer whose hello is changed on its way: the listener's answer, and that it lives."""
    b, c, other = world
    a, d = Peer("a", secret=SECRET), Peer("d", **({"secret": secret} if secret else {}))

    def hook(way, m):
        if way == "up" and m.WhichOneof("m") == "hello":
            change(m.hello)
        yield m
    proxy = Proxy(a, hook)
    other += [proxy, d, a]
    a.grant(1, 1, 64, 32, 5)
    d.recv(proxy, 1, 1, 64, 32)
    d.wait("failed 1 ERR_PEER_LOST .*did not prove that it belongs")
    return a, d


def wire_ports(pid):
    inodes = sockets(pid)
    return sorted({int(r[1].split(":")[1], 16) for r in tcp_rows() if r[3] == "0A" and r[9] in inodes})


def gone(s):
    s.setblocking(False)
    try:
        return s.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def wait_for(true, what):
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, f"not in {WAIT_S} s: {what}"
        time.sleep(0.1)


def test_who_connects_to_a_lanes_port_holds_little(world):
    """UCX keeps what connects to it, silent or not. A lane's port has room for few, a stranger learns that at once, and
    peers go on: on lanes that stand, on new ones, and when the strangers have left."""
    b, c, _ = world
    b.say(f"storm c {c.addr} {c.inc} 20 4 64 32 8 1")
    b.wait("storm done=")
    wire = b.wire_pid()
    ports = wire_ports(wire)
    assert ports
    fds = len(os.listdir(f"/proc/{wire}/fd"))
    strangers = [socket.create_connection(("127.0.0.1", port), WAIT_S) for port in ports for _ in range(200)]
    wait_for(lambda: sum(gone(s) for s in strangers) >= 190 * len(ports), "most of them are turned away")
    wait_for(lambda: len(os.listdir(f"/proc/{wire}/fd")) <= fds + 8 * len(ports), "there is room for few")
    d = Peer("d")
    world[2].append(d)
    for peer in (c, d):
        after = b.mark()
        b.say(f"storm {peer.name} {peer.addr} {peer.inc} 20 4 64 32 8 1")
        b.wait("storm done=", after=after)
    for s in strangers:
        s.close()
    wait_for(lambda: len(os.listdir(f"/proc/{wire}/fd")) <= fds + 16, "what they held is free")
    assert b.wire_pid() == wire
    b.logged("ev=strangers_refused")


def test_members_move_kv(world):
    a, d = Peer("a", secret=SECRET), Peer("d", secret=SECRET)
    world[2].extend([a, d])
    a.grant(1, 1, 64, 32, 5)
    d.recv(a, 1, 1, 64, 32)
    a.say("raise 1 8")
    d.wait("progress 1 8")


@pytest.mark.parametrize("field", ["ucx_address", "nonce", "address_mac", "none"])
def test_a_changed_address_is_not_taken(world, field):
    def change(h):
        if field == "nonce":
            h.nonce ^= 1
        elif field == "none":
            h.address_mac = b""
        else:
            v = bytearray(getattr(h, field))
            v[random.randrange(len(v))] ^= 1 << random.randrange(8)
            setattr(h, field, bytes(v))
    a, d = refused(world, change)
    assert a.p.poll() is None and d.p.poll() is None


def test_who_has_another_secret_or_none_is_no_member(world):
    refused(world, lambda h: None, secret="another secret of 32 bytes or more")
    refused(world, lambda h: None, secret=None)


def test_a_short_secret_is_refused():
    p = subprocess.run([tool(), "name=a", "secret=short"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                       text=True, timeout=WAIT_S)
    assert p.returncode == 2 and "kv.salt_file" in p.stderr

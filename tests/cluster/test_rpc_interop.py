"""common/rpc against grpcio, an independent peer: our C server with its client, and the reverse.

The C side is tests/tools/rpc_echo.c; messages are plain bytes, so no .proto is needed.
"""
import os
import select
import signal
import subprocess
from concurrent import futures

import grpc
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
TOOL = os.path.join(BUILD, "tests", "tools", "rpc_echo")
WAIT_S = 60  # only what hangs takes so long

OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.enable_http_proxy", 0)]


def read_line(proc):
    """One line of the process's output, or an assertion: never waits for ever."""
    ready, _, _ = select.select([proc.stdout], [], [], WAIT_S)
    assert ready, "rpc_echo printed nothing"
    return proc.stdout.readline().decode().strip()


class Echo:
    def __init__(self, listen):
        self.proc = subprocess.Popen([TOOL, "serve", listen], stdout=subprocess.PIPE, bufsize=0)
        self.port = int(read_line(self.proc))
        self.target = listen if listen.startswith("unix:") else "127.0.0.1:%d" % self.port
        self.channel = grpc.insecure_channel(self.target, options=OPTIONS)
        self.unary = self.channel.unary_unary("/t.Echo/Unary")
        self.stream = self.channel.stream_stream("/t.Echo/Stream")

    def end(self):
        self.channel.close()
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
        try:
            rc = self.proc.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
            rc = "hung"
        self.proc.stdout.close()
        return rc


@pytest.fixture
def echo():
    e = Echo("127.0.0.1:0")
    yield e
    assert e.end() in (0, -signal.SIGKILL)


# ---- grpcio as the client of our server ----

def test_unary(echo):
    for body in (b"", b"hello", os.urandom(100000), b"x" * (8 << 20)):
        assert echo.unary(body, timeout=WAIT_S) == body


def test_unary_status(echo):
    with pytest.raises(grpc.RpcError) as e:
        echo.unary(b"fail:5:no such thing", timeout=WAIT_S)
    assert e.value.code() == grpc.StatusCode.NOT_FOUND
    assert e.value.details() == "no such thing"


def test_unknown_method(echo):
    with pytest.raises(grpc.RpcError) as e:
        echo.channel.unary_unary("/t.Echo/Nope")(b"x", timeout=WAIT_S)
    assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "/t.Echo/Nope" in e.value.details()
    with pytest.raises(grpc.RpcError) as e:
        list(echo.channel.stream_stream("/other/Nope")(iter([b"x"]), timeout=WAIT_S))
    assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_message_too_large(echo):
    with pytest.raises(grpc.RpcError) as e:
        echo.unary(b"x" * ((16 << 20) + 1), timeout=WAIT_S)
    assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert echo.unary(b"goes on", timeout=WAIT_S) == b"goes on"


def test_stream(echo):
    messages = [b"message %d" % i for i in range(1000)]
    assert list(echo.stream(iter(messages), timeout=WAIT_S)) == messages
    assert read_line(echo.proc) == "closed 0"


def test_stream_large(echo):
    messages = [bytes([i]) * (1 << 20) for i in range(20)]
    assert list(echo.stream(iter(messages), timeout=WAIT_S)) == messages


def test_burst_to_a_slow_reader(echo):
    """40 MiB for a reader that takes its time: all of it arrives, in order."""
    got = list(echo.stream(iter([b"burst:40:1048576"]), timeout=WAIT_S))
    assert [len(m) for m in got] == [1 << 20] * 40
    assert [m[:1] for m in got] == [bytes([97 + i % 26]) for i in range(40)]


def test_server_ends_stream(echo):
    call = echo.stream(iter([b"a", b"burst:10:5", b"close:9:not like this"]), timeout=WAIT_S)
    got = []
    with pytest.raises(grpc.RpcError) as e:
        for m in call:
            got.append(m)
    assert len(got) == 11  # what was queued comes before the status
    assert e.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert e.value.details() == "not like this"


def test_cancel(echo):
    def requests():
        yield b"a"
        futures.Future().result(WAIT_S)  # stays open

    call = echo.stream(requests())
    assert next(call) == b"a"
    call.cancel()
    assert read_line(echo.proc) == "closed 1"


def test_deadline(echo):
    def requests():
        yield b"a"
        try:
            futures.Future().result(5)
        except futures.TimeoutError:
            pass

    assert echo.unary(b"the connection stands", timeout=WAIT_S)  # a second is for the call alone
    call = echo.stream(requests(), timeout=1)
    with pytest.raises(grpc.RpcError) as e:
        for _ in call:
            pass
    assert e.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert read_line(echo.proc) == "closed 1"


def test_server_goes(echo):
    def requests():
        yield b"a"
        try:
            futures.Future().result(5)
        except futures.TimeoutError:
            pass

    call = echo.stream(requests())
    assert next(call) == b"a"
    echo.proc.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as e:
        next(call)
    assert e.value.code() == grpc.StatusCode.UNAVAILABLE
    assert echo.proc.wait(WAIT_S) == 0


def test_unix_socket(tmp_path):
    e = Echo("unix:%s/s" % tmp_path)
    try:
        assert e.unary(b"u", timeout=WAIT_S) == b"u"
    finally:
        assert e.end() == 0


# ---- our client with grpcio's server ----

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method == "/t.Echo/Unary":
            return grpc.unary_unary_rpc_method_handler(self.unary)
        if details.method == "/t.Echo/Stream":
            return grpc.stream_stream_rpc_method_handler(self.stream)
        if details.method == "/t.Echo/Refuse":
            return grpc.stream_stream_rpc_method_handler(self.refuse)
        return None

    def unary(self, request, context):
        if request == b"fail":
            context.abort(grpc.StatusCode.ABORTED, "said no")
        return request[::-1]

    def stream(self, requests, context):
        for r in requests:
            yield r

    def refuse(self, requests, context):
        next(requests)
        yield b"one"
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


@pytest.fixture
def server():
    s = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    s.add_generic_rpc_handlers((Handler(),))
    port = s.add_insecure_port("127.0.0.1:0")
    s.start()
    yield "127.0.0.1:%d" % port
    s.stop(None).wait(WAIT_S)


def tool(*args):
    out = subprocess.run([TOOL] + list(args), stdout=subprocess.PIPE, timeout=WAIT_S, check=True)
    return out.stdout.decode().splitlines()


def test_c_unary(server):
    assert tool("unary", server, "/t.Echo/Unary", "abc") == ["0 ", b"cba".hex()]
    assert tool("unary", server, "/t.Echo/Unary", "fail")[0] == "10 said no"
    assert tool("unary", server, "/t.Echo/Nope", "x")[0].startswith("12 ")


def test_c_unary_nobody():
    assert tool("unary", "127.0.0.1:1", "/t.Echo/Unary", "x")[0].startswith("14 ")


def test_c_stream(server):
    assert tool("stream", server, "/t.Echo/Stream", "500") == ["got 500 paused 0"]
    assert tool("stream", server, "/t.Echo/Refuse", "500") == ["closed 8 full after 1"]


def test_c_flood(server):
    """64 MiB through a queue of 8: the sender is held back, and nothing is lost."""
    assert tool("flood", server, "/t.Echo/Stream") == ["got 1024 paused 1"]

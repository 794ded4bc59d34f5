"""Traces over OTLP: what a collector gets from a real cluster, read with OpenTelemetry's own messages (npm; without it these tests
are skipped), and that a collector that is slow or not there costs nothing."""
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import threading

import pytest

import npm_packages
from conftest import BUILD, ROOT, Cluster, wait_for
from local_cluster import start_time
from restarts import Restarts

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "otlp")
MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
NULL = "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = 'baton_trace_spans_total{result="sent"}'


class Collector:
    """An OTLP/HTTP receiver: keeps bodies in files, answers with the next of `answers` (200 when there is none)."""

    def __init__(self, folder):
        self.files, self.headers, self.answers, self.folder = [], [], [], folder
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = outer.answers.pop(0) if outer.answers else 200
                outer.headers.append((self.path, dict(self.headers), status))
                if status == 200:
                    file = os.path.join(folder, f"{len(outer.files)}.bin")
                    with open(file, "wb") as f:
                        f.write(body)
                    outer.files.append(file)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def cluster_with(environment, *options, make=Cluster):
    """Daemons inherit the environment."""
    with pytest.MonkeyPatch.context() as m:
        for name, value in environment.items():
            m.setenv(name, value)
        return make(*options)


@pytest.fixture(scope="module")
def decode():
    """The spans in files. Each file is decoded once, because node needs some tenths of a second to start."""
    folder, known = npm_packages.install(HERE), {}
    shutil.copy(os.path.join(HERE, "decode.cjs"), folder)

    def run(files):
        for file in [f for f in files if f not in known]:
            out = subprocess.run(["node", "decode.cjs", file], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True,
                                 timeout=60)
            known[file] = [json.loads(line) for line in out.stdout.splitlines()]
        return [s for file in files for s in known[file]]
    return run


@pytest.fixture(scope="module")
def collector(tmp_path_factory):
    return Collector(str(tmp_path_factory.mktemp("bodies")))


@pytest.fixture(scope="module")
def c(collector):
    c = cluster_with({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}", "OTEL_BSP_SCHEDULE_DELAY": "100",
                      "OTEL_SERVICE_NAME": "chat", "OTEL_EXPORTER_OTLP_HEADERS": "x-token=a%20b"})
    yield c
    c.stop()


def traced(c, collector, decode, trace, path, body):
    """The spans of one request, once its root is there: {name: [span]}."""
    c.request("POST", path, body, {"traceparent": f"00-{trace}-{PARENT}-01"})

    def look():
        spans = [s for s in decode(list(collector.files)) if s["trace"] == trace]
        return spans if any(s["parent"] == PARENT for s in spans) else None
    out = {}
    for s in wait_for(look, 60, "the spans", every_s=0.3):
        out.setdefault(s["name"], []).append(s)
    return out


def test_spans_of_a_request(c, collector, decode):
    spans = traced(c, collector, decode, TRACE, "/v1/chat/completions",
                   {"messages": [{"role": "user", "content": "Speak. " * 60}], "max_tokens": 6, "ignore_eos": True})
    root = spans.pop(f"chat {c.model}")[0]
    assert root["kind"] == 2 and root["status"] is None and root["parent"] == PARENT
    assert root["resource"]["service.name"] == "chat" and root["resource"]["service.version"] and root["scope"] == "baton"
    a = root["attributes"]
    assert a["gen_ai.operation.name"] == "chat" and a["gen_ai.provider.name"] == "baton"
    assert a["gen_ai.request.model"] == a["gen_ai.response.model"] == c.model and a["gen_ai.response.id"].startswith("chatcmpl-")
    assert a["gen_ai.usage.output_tokens"] == a["gen_ai.request.max_tokens"] == 6
    assert a["gen_ai.response.finish_reasons"] == ["length"] and a["baton.replans"] == 0
    assert a["baton.ttft_ms"] > 0 and a["baton.predicted.ttft_ms"] > 0 and "error.type" not in a
    assert {k: len(v) for k, v in spans.items()} == {"queue": 1, "plan": 1, "prefill": 1, "flow": 1, "decode": 1}
    for name, (s,) in spans.items():
        assert s["kind"] == 1 and s["parent"] == root["id"] and s["attributes"]["baton.epoch"] <= 1, name
        assert int(root["start"]) <= int(s["start"]) <= int(s["end"]) <= int(root["end"]), name
    plan, prefill, flow, decoded = (spans[n][0]["attributes"] for n in ("plan", "prefill", "flow", "decode"))
    assert plan["baton.prefill_worker"] == prefill["baton.worker"] and plan["baton.decode_worker"] == decoded["baton.worker"]
    assert plan["baton.tokens"] == a["gen_ai.usage.input_tokens"] == prefill["baton.tokens"] + prefill["baton.cached_tokens"]
    assert plan["baton.predicted.ttft_ms"] == a["baton.predicted.ttft_ms"] and prefill["baton.predicted.prefill_ms"] >= 0
    assert flow["baton.bytes"] > 0 and flow["baton.sender"] != flow["baton.receiver"] and decoded["baton.tokens"] == 6
    path, headers, _ = collector.headers[0]
    assert path == "/v1/traces" and headers["Content-Type"] == "application/x-protobuf" and headers["x-token"] == "a b"


def test_other_traceparents_begin_traces(c, collector, decode):
    """Hostile or wrong ones are ignored, and one without the flag is not traced."""
    for bad in ("00-" + "0" * 32 + f"-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "x" * 4000, f"00-{TRACE.upper()}-{PARENT}-01", "\xff\xfe"):
        assert c.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, {"traceparent": bad})[0] == 200
    off = "1" * 32
    assert c.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, {"traceparent": f"00-{off}-{PARENT}-00"})[0] == 200
    name = f"text_completion {c.model}"

    def roots():
        found = [s for s in decode(list(collector.files)) if s["name"] == name]
        return found if len(found) >= 5 else None
    found = wait_for(roots, 60, "five traces", every_s=0.3)
    assert len(found) == 5 and all(s["parent"] == "" and s["trace"] not in (TRACE, off) for s in found)
    assert len({s["trace"] for s in found}) == 5


def test_a_killed_worker_is_a_replan(collector, decode):
    """On an engine whose 300 tokens take three seconds, so that the request runs when its worker is looked for."""
    r = cluster_with({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{collector.port}/v1/traces",
                      "OTEL_BSP_SCHEDULE_DELAY": "100", "BATON_NULL_PACE": "10000,0"}, *NULL, "--decode", "2", make=Restarts)
    try:
        trace = "2" * 32
        stream = r.c.stream("/v1/completions", {"prompt": "ROMEO:\n", "max_tokens": 300, "ignore_eos": True},
                            {"traceparent": f"00-{trace}-{PARENT}-01"})
        next(stream)
        r.kill_busiest("decode")
        assert list(stream)[-1] == "[DONE]"
        spans = wait_for(lambda: (lambda s: s if any(x["parent"] == PARENT for x in s) else None)(
            [s for s in decode(list(collector.files)) if s["trace"] == trace]), 60, "the spans", every_s=0.3)
        names = [s["name"] for s in sorted(spans, key=lambda s: int(s["start"]))]
        assert names.count("replan") == 1 and names.count("plan") == 2 and names.count("decode") == 2
        replan = next(s for s in spans if s["name"] == "replan")
        assert "lost" in replan["attributes"]["baton.reason"] and int(replan["end"]) > int(replan["start"])
        tokens = sum(s["attributes"]["baton.tokens"] for s in spans if s["name"] == "decode")
        assert tokens == 300
    finally:
        r.stop()


def test_a_collector_that_asks_to_wait(c, collector):
    """503 with the same spans again, 400 never again."""
    before = c.metrics("conductor")
    collector.answers[:] = [503, 200, 400]
    n = len(collector.headers)
    c.complete("a", 1)
    wait_for(lambda: len(collector.headers) >= n + 2, 60, "the second try")
    c.complete("a", 1)
    refused = 'baton_trace_spans_total{result="refused"}'
    wait_for(lambda: c.metrics("conductor")[refused] > before[refused], 60, "refused")
    assert [h[2] for h in collector.headers[n:n + 3]] == [503, 200, 400]
    assert c.metrics("conductor")[SENT] > before[SENT]


def test_collectors_that_are_not_there():
    """One refuses connections, one takes them and never answers. Nobody waits for them, not even the conductor's end: the
    collector itself would have ten minutes."""
    for silent in (False, True):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            if silent:
                s.listen(1)
            c = cluster_with({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{s.getsockname()[1]}", "OTEL_BSP_SCHEDULE_DELAY": "10",
                              "OTEL_EXPORTER_OTLP_TIMEOUT": "600000"}, *NULL, "--nodes", "1")
            try:
                for _ in range(8):
                    c.complete("ROMEO:\n", 2)
                assert c.metrics("conductor")[SENT] == 0
                pid = c.daemon("conductor")["pid"]
                os.kill(pid, signal.SIGTERM)
                wait_for(lambda: not start_time(pid), 60, "the conductor ends")
            finally:
                c.stop()


@pytest.mark.parametrize("name,value,said", [
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "begins with http://"),
    ("OTEL_TRACES_SAMPLER", "jaeger_remote", "use always_on"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "use http/protobuf"),
    ("OTEL_EXPORTER_OTLP_HEADERS", "a=b%0d%0ac: d", "name=value"),
])
def test_a_wrong_environment_is_refused(name, value, said):
    """By --check already, and in the same words at the start."""
    for how in ["--check=values"], []:
        p = subprocess.run([os.path.join(BUILD, "bin", "baton-conductor"), *how, "--set", "node.id=n1", "--set", f"model.path={MODEL}"],
                           env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", name: value},
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        assert p.returncode == 2 and name in p.stdout and said in p.stdout, (how, p.returncode, p.stdout)

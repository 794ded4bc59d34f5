"""What the web page reads: /admin/v1/. It says what batonctl says, and a hostile path gets an answer."""
import json
import os
import subprocess
import time

import pytest

from conftest import CTL, Cluster, wait_for

ALL = "sk-all-0123456789abcdef"
PROMPT = "ROMEO: " + "what is love? " * 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"sk-{scope}-0123456789abcdef id={scope} scopes={scope}\n" for scope in ("inference", "metrics", "admin"))
                    + ALL + " id=all scopes=inference,metrics,admin\n")
    keys.chmod(0o600)
    c = Cluster("--set", f"conductor.conductor.api_keys_file={keys}", "--set", "conductor.sched.ttft_objective_ms=60s", "--set", "conductor.conductor.http.allowed_origins=*", api_key=ALL)
    yield c
    c.stop()


def ctl(cluster, *args):
    addr = cluster.daemon("conductor")["grpc"]
    p = subprocess.run([CTL, *args, "--addr", addr, "-o", "json"], stdout=subprocess.PIPE, timeout=60, check=True,
                       env=dict(os.environ, BATON_API_KEY=ALL))
    return json.loads(p.stdout)


def test_status(cluster):
    page, nodes = cluster.get("/admin/v1/status"), ctl(cluster, "nodes")
    assert page["serving"] and page["ttft_objective_ms"] == 60000
    assert sorted((n["member"]["kind"], n["member"]["name"], n["member"]["node"], n["member"]["http"])
                  for n in page["nodes"]) == sorted((n["kind"], n["name"], n["node"], n["http"]) for n in nodes)
    store = [n for n in page["nodes"] if n["member"]["kind"] == "kvstore"]
    assert len(store) == 2 and all(n["pool"]["slots_total"] > 0 for n in store)


def test_life_of_a_request(cluster):
    """The parts of a request's time fit together, in the list and in its explanation."""
    status, headers, body = cluster.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 32, "ignore_eos": True},
                                            headers={"x-baton-timings": "1"})
    answer = json.loads(body)
    times = answer["timings"]
    recent = wait_for(lambda: [r for r in cluster.get("/admin/v1/requests")["recent"]["list"]
                               if r["id"] == answer["id"] and r["outcome"]], 5, "its end is known")[0]
    o = recent["outcome"]
    assert (o["tokens"], o["error"], o["in_time"]) == (32, "", True)
    for name in ("ttft_ms", "queue_ms", "prefill_ms", "decode_ms", "kv_bytes"):
        assert o[name] == pytest.approx(times[name], abs=0.01), name
    assert 0 <= o["planned_ms"] <= o["queue_ms"] + 1 and o["planned_ms"] <= o["ttft_ms"]
    assert recent["prefill"] == times["prefill"] and recent["decode"] == times["decode"] and not recent["both"]
    # both ends of the flow lie within the request, as all clocks here are one
    assert 0 <= o["flow_from_ms"] <= o["flow_to_ms"] <= o["ttft_ms"] + o["decode_ms"] + 50
    why = cluster.get("/admin/v1/explain/" + answer["id"])
    assert why["candidates"] and recent["candidates"] == []
    assert {k: v for k, v in why.items() if k != "candidates"} == {k: v for k, v in recent.items() if k != "candidates"}
    assert ctl(cluster, "explain", answer["id"])["candidates_total"] == why["candidates_total"]
    assert cluster.get("/admin/v1/explain/" + why["wire_id"])["id"] == answer["id"]
    assert "love" not in json.dumps(cluster.get("/admin/v1/requests"))  # no text of prompts or answers


def test_open_and_late(cluster):
    """A request that runs is in the list of the open ones; one that misses its objective is not in time."""
    before = cluster.get("/admin/v1/history")["list"][-1]
    events = cluster.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True})
    first = next(events)
    opened = [r for r in cluster.get("/admin/v1/requests")["open"]["list"] if r["id"] == first["id"]]
    assert opened and opened[0]["state"] == "decoding" and opened[0]["tokens"] >= 1, opened
    events.close()
    status, _, body = cluster.request("POST", "/v1/completions", {"prompt": "O", "max_tokens": 8, "ignore_eos": True},
                                      headers={"x-slo-tbt-ms": "0.001"})
    if status == 200:  # admission may refuse it at once: then nothing is late
        late = cluster.get("/admin/v1/explain/" + json.loads(body)["id"])["outcome"]
        assert late["in_time"] is False
    history = cluster.get("/admin/v1/history")
    after = history["list"][-1]
    assert after["finished"] - before["finished"] == (status == 200) and after["in_time"] == before["in_time"]
    assert after["refused"] - before["refused"] == (status == 429)
    assert history["ttft_objective_ms"] == 60000 and history["step_ms"] > 0
    wait_for(lambda: not cluster.get("/admin/v1/requests")["open"]["list"], 10, "the cancelled one is gone")


def test_history_goes_on(cluster):
    n = len(cluster.get("/admin/v1/history")["list"])
    wait_for(lambda: len(cluster.get("/admin/v1/history")["list"]) > n, 20, "a further sample", every_s=0.5)
    at = [s["at_ns"] for s in cluster.get("/admin/v1/history")["list"]]
    assert at == sorted(at)


def test_hostile(cluster):
    for path in ("explain/%3Cscript%3E", "explain/" + "a" * 3000, "explain/%00", "explain/%0a%22", "explain/..%2f..", "nothing", "",
                 "status/", "explain"):
        status, headers, body = cluster.request("GET", "/admin/v1/" + path)
        assert status in (400, 404) and headers["content-type"] == "application/json", (path, status)
        assert len(json.loads(body)["error"]["message"]) < 600
    assert cluster.request("POST", "/admin/v1/status", {})[0] == 405
    # pages of other origins may use the API, as configured, but not read this
    status, headers, _ = cluster.request("GET", "/admin/v1/status", headers={"Origin": "https://elsewhere.example"})
    assert status == 200 and "access-control-allow-origin" not in headers
    assert "access-control-allow-origin" in cluster.request("GET", "/v1/models", headers={"Origin": "https://elsewhere.example"})[1]
    status, headers, body = cluster.request("HEAD", "/admin/v1/requests")
    assert status == 200 and body == b"" and headers["cache-control"] == "no-store"


def test_scopes(cluster):
    """Only a key with the scope admin reads this; a stranger gets no hint of what there is."""
    for path in ("status", "requests", "history", "explain/x"):
        for key, expect in (("wrong", 401), ("sk-inference-0123456789abcdef", 403), ("sk-metrics-0123456789abcdef", 403)):
            status, _, body = cluster.request("GET", "/admin/v1/" + path, headers={"Authorization": "Bearer " + key})
            assert status == expect and b"kvstore" not in body, (path, key, status, body)
            assert expect == 401 or b"admin" in body
        status, _, _ = cluster.request("GET", "/admin/v1/" + path, headers={"Authorization": "Bearer sk-admin-0123456789abcdef"})
        assert status == (404 if "explain" in path else 200), path
    for path in ("/", "/docs", "/openapi.json", "/ui/reference.css"):
        c = cluster.connect()
        c.request("GET", path)
        assert c.getresponse().status == 200, path
        c.close()


def test_cost(cluster):
    """An answer is short work for the control loop, with 128 plans in the list."""
    for _ in range(140):
        cluster.complete("O", 1)
    began = time.thread_time()
    recent = cluster.get("/admin/v1/requests")["recent"]["list"]
    assert len(recent) == 128 and time.thread_time() - began < 5
    assert [r["planned_ns"] for r in recent] == sorted((r["planned_ns"] for r in recent), reverse=True)
    assert len(cluster.request("GET", "/admin/v1/requests")[2]) < 200_000

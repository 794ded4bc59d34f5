"""What docs/METRICS.md says of metrics is what real daemons serve, and vLLM's series count what its dashboards expect."""
import http.client
import os
import re

import pytest

from conftest import ROOT, Cluster, wait_for

# Rows without a series in the cluster below: (daemon, beginning of the name).
ABSENT = [
    ("conductor", "baton_http_tls_"),  # clients speak plain HTTP
    ("conductor", "baton_role_policy_"),  # sched.roles is off
    ("kvstore", "baton_kv_card_"),  # made for network cards, of which loopback is none
    ("kvstore", "baton_pool_tenant_"),  # no tenants
]


@pytest.fixture(scope="module")
def c(tmp_path_factory):
    """Two nodes with SSDs and certificates, so that these have their series."""
    ssd = tmp_path_factory.mktemp("ssd")
    c = Cluster("--tls", "--set", "conductor.conductor.http.tls=", "--set", f"kvstore.kvstore.ssd.path={ssd}/{{node}}", "--set", "kvstore.kvstore.ssd.bytes=64MiB")
    yield c
    c.stop()


def tables():
    """{daemon: {metric: (type, labels)}} of docs/METRICS.md."""
    out, rows = {}, None
    with open(os.path.join(ROOT, "docs", "METRICS.md")) as f:
        for line in f:
            if line.startswith("## "):
                rows = {}
                for daemon in re.findall(r"baton-(\w+)", line) or ["all"]:
                    out[daemon] = rows
            m = re.match(r"\| `([^`]+)` \| (\w+) \| [^|]* \| ([^|]*) \|", line)
            if m:
                rows[m[1]] = m[2], set(filter(None, m[3].strip().split(", ")))
    return out


def exposition(address):
    host, port = address.rsplit(":", 1)
    conn = http.client.HTTPConnection(host, int(port), timeout=60)
    conn.request("GET", "/metrics")
    text = conn.getresponse().read().decode()
    conn.close()
    return text


def series(text):
    """{metric: (type, set of label names)} of an exposition."""
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))
    out = {}
    for name, labels in re.findall(r'^([a-z][\w:]*)(?:\{((?:\w+="(?:\\.|[^"\\])*",?)*)\})? \S+$', text, re.M):
        base = name if name in types else re.sub(r"_(bucket|sum|count)$", "", name)
        names = set(re.findall(r'(\w+)="(?:\\.|[^"\\])*"', labels)) - ({"le"} if types[base] == "histogram" else set())
        assert out.setdefault(base, (types[base], names)) == (types[base], names), f"labels of {name} differ"
    return out


def test_the_tables_say_what_daemons_serve(c):
    c.complete("ROMEO:\n", 4)
    doc = tables()
    assert set(doc) == {"conductor", "prefill", "decode", "kvstore", "all"}
    for d in c.status():
        if d["daemon"] == "etcd":
            continue
        got = series(exposition(d["http"]))
        want = doc[d["daemon"]]
        for name, kind in got.items():
            assert kind == {**doc["all"], **want}.get(name), (d["daemon"], name, kind)
        lacking = {n for n in want if n not in got and not any(
            d["daemon"] == k and n.startswith(begin) for k, begin in ABSENT)}
        assert not lacking, (d["daemon"], lacking)


def of(metrics, name):
    """The one series of this name that has model_name and no bucket."""
    found = [v for k, v in metrics.items() if re.match(re.escape(name) + r"\{[^}]*model_name=", k) and "le=" not in k]
    assert len(found) == 1, (name, found)
    return found[0]


def buckets(metrics, name):
    return sorted(float(m[1]) for k in metrics if (m := re.match(re.escape(name) + r'_bucket\{.*le="([\d.e+]+)"\}', k)))


def test_series_of_vllm(c):
    before = c.metrics("conductor")
    n = c.complete("The king", 6, n=2, temperature=1.0, ignore_eos=True)["usage"]
    assert n["completion_tokens"] == 12
    # The conductor counts the request when its client has had the answer, so perhaps a moment later.
    wait_for(lambda: of(c.metrics("conductor"), "vllm:e2e_request_latency_seconds_count")
             == of(before, "vllm:e2e_request_latency_seconds_count") + 1, 60, "the request is counted")
    after = c.metrics("conductor")

    def grew(name):
        return of(after, name) - of(before, name)

    assert grew("vllm:request_prompt_tokens_sum") == n["prompt_tokens"]
    assert grew("vllm:request_generation_tokens_sum") == 12
    assert grew("vllm:request_max_num_generation_tokens_sum") == 6
    assert grew("vllm:request_params_max_tokens_sum") == 6
    assert grew("vllm:request_params_n_sum") == 2
    assert grew("vllm:time_per_output_token_seconds_count") == grew("vllm:inter_token_latency_seconds_count") == 10
    phases = ["vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"]
    for name in phases + ["vllm:request_inference_time_seconds"]:
        assert grew(name + "_count") == 1, name
    parts = sum(grew(p + "_sum") for p in phases)
    assert 0 < parts <= grew("vllm:e2e_request_latency_seconds_sum") + 1e-6
    assert abs(grew("vllm:time_to_first_token_seconds_sum") + grew(phases[2] + "_sum") - parts) < 0.01
    assert buckets(after, "vllm:request_prompt_tokens")[:6] == [1, 2, 5, 10, 20, 50]
    assert buckets(after, "vllm:request_decode_time_seconds")[:3] == [0.3, 0.5, 0.8]
    for kind in ("prefill", "decode"):
        m = c.metrics(kind)
        assert of(m, "vllm:gpu_cache_usage_perc") == of(m, "vllm:kv_cache_usage_perc")

"""What docs/METRICS.md says of metrics is what real daemons serve."""
import http.client
import os
import re

import pytest

from conftest import ROOT, Cluster

# Rows without a series in the cluster below: (daemon, beginning of the name).
ABSENT = [
    ("conductor", "baton_role_policy_"),  # sched.roles is off
    ("kvstore", "baton_kv_card_"),  # made for network cards, of which loopback is none
    ("kvstore", "baton_pool_tenant_"),  # no tenants
]


@pytest.fixture(scope="module")
def c(tmp_path_factory):
    """Two nodes with SSDs and certificates, so that these have their series."""
    ssd = tmp_path_factory.mktemp("ssd")
    c = Cluster("--tls", "--set", f"kvstore.kvstore.ssd.path={ssd}/{{node}}", "--set", "kvstore.kvstore.ssd.bytes=64MiB")
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
    conn = http.client.HTTPConnection(host, int(port), timeout=10)
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

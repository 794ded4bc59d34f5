"""Keys that no other test sets, in one cluster: what each of them changes. The limits of all keys are in
tests/unit/test_conf_keys.c."""
import json
import random
import socket
import subprocess

import pytest

from conftest import CTL, Cluster, wait_for
from local_cluster import free_port

BLOCK, INDEX, MAX_LEN = 4, 1024, 300


@pytest.fixture(scope="module")
def cluster():
    rpc, wire = free_port(), free_port()
    c = Cluster(
        "--nodes", "1", "--set", f"all.kv.block_tokens={BLOCK}", "--set", "prefill.engine.device=null",
        "--set", "decode.engine.device=null", "--set", f"conductor.index_blocks={INDEX}", "--set", f"conductor.model.max_len={MAX_LEN}",
        "--set", f"kvstore.rpc.listen=127.0.0.1:{rpc}", "--set", f"kvstore.rpc.advertise=localhost:{rpc}",
        "--set", "kvstore.kvstore.wire.transport=grpc", "--set", f"kvstore.kvstore.wire.listen=127.0.0.1:{wire}")
    c.rpc, c.wire = rpc, wire
    yield c
    c.stop()


def ask(c, tokens, max_tokens=1, expect=200):
    return c.post("/v1/completions", {"prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True}, expect)


def test_max_len(cluster):
    ask(cluster, [5] * (MAX_LEN - 1))
    for n, more in ((MAX_LEN, 1), (MAX_LEN - 1, 2)):
        body = ask(cluster, [5] * n, more, expect=400)
        assert f"maximum context length is {MAX_LEN} tokens" in body["error"]["message"], body


def test_the_index_has_a_limit(cluster):
    r = random.Random(1)

    def metrics():
        return cluster.metrics("conductor")

    before = metrics()["baton_index_blocks"]  # those of an earlier prompt may still come
    ask(cluster, [r.randrange(100, 1000) for _ in range(240)])
    wait_for(lambda: metrics()["baton_index_blocks"] >= before + 240 // BLOCK, 30, "the blocks of one prompt")
    assert metrics()["baton_index_refused_total"] == 0
    for _ in range(INDEX // (240 // BLOCK) + 2):
        ask(cluster, [r.randrange(100, 1000) for _ in range(240)])
    wait_for(lambda: metrics()["baton_index_refused_total"] > 0, 30, "blocks that the full index refused")
    assert metrics()["baton_index_blocks"] <= INDEX


def test_advertised_address_and_fixed_port(cluster):
    out = subprocess.run([CTL, "--dir", cluster.state_dir, "nodes", "-o", "json"], stdout=subprocess.PIPE, timeout=30,
                         check=True).stdout
    kv = next(n for n in json.loads(out) if n["kind"] == "kvstore")
    assert kv["rpc"] == f"localhost:{cluster.rpc}", kv
    socket.create_connection(("127.0.0.1", cluster.wire), 60).close()

"""Hot prefixes are copied to another node before anybody needs them there."""
import json
import os
import signal

from conftest import wait_for
from test_conductor_ctl import ctl

PROMPT = "Tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day; " * 4


def holders(c):
    """Kvstores of the first blocks of chains, by depth 0..: sets of names."""
    with open(os.path.join(c.state_dir, "conductor.addr")) as f:
        addr = f.read().strip()
    rc, out, err = ctl("--addr", addr, "blocks", "-o", "json", "--limit", "10000")
    assert rc == 0, err
    return [set(b["kvstores"]) for b in json.loads(out)["list"]]


def metric(c, name):
    return sum(v for k, v in c.metrics("conductor").items() if k.startswith(name))


def test_a_copy_comes_before_its_need(make_cluster):
    c = make_cluster("--nodes", "3", "--prefill", "2", "--decode", "1", "--set", "conductor.sched.replica_bytes_per_s=1GB")
    first = c.complete(PROMPT, 16)
    blocks = first["usage"]["prompt_tokens"] // 16
    assert blocks >= 6
    want = first["choices"][0]["text"]
    wait_for(lambda: metric(c, "baton_index_blocks") >= blocks, 30, "the prompt's blocks are known")

    def prefill_nodes():
        """Of the nodes with a prefill worker, how many have all of the prompt."""
        names = {"kvstore-" + d["node"] for d in c.status() if d["daemon"] == "prefill"}
        return [n for n in names if sum(n in h for h in holders(c)) >= blocks]

    at = wait_for(prefill_nodes, 30, "all of them")
    assert len(at) == 1
    for _ in range(2):
        assert c.complete(PROMPT, 16)["choices"][0]["text"] == want
    assert metric(c, "baton_replicas_started_total") == 0  # not hot yet
    for _ in range(18):  # a copy comes with the 16th use within a minute
        assert c.complete(PROMPT, 16)["choices"][0]["text"] == want
    wait_for(lambda: len(prefill_nodes()) == 2, 30, "the other prefill node has it")
    assert metric(c, "baton_replicas_started_total") >= 1
    wait_for(lambda: metric(c, "baton_replica_blocks_total") >= blocks - 1, 30, "the kvstore has said so")
    # The node that computed it dies: the copy serves, nothing of it is computed again.
    for d in c.status():
        if d["daemon"] in ("prefill", "kvstore") and "kvstore-" + d["node"] == at[0]:
            os.kill(d["pid"], signal.SIGKILL)
    wait_for(lambda: metric(c, 'baton_sessions_up{kind="worker"}') == 2, 30, "the worker is missed")
    again = c.complete(PROMPT, 16)
    assert again["choices"][0]["text"] == want
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 * (blocks - 1)

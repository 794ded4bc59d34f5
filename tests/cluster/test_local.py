"""baton-local and batonctl as a user meets them: usage, several clusters, nothing left behind."""
import json
import os
import subprocess

import pytest

from conftest import BUILD, CTL, LOCAL, ROOT, Cluster


def run(*args, env=None):
    env = dict(env or os.environ, BATON_BIN=os.path.join(BUILD, "bin"))
    p = subprocess.run([str(a) for a in args], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, timeout=120)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


@pytest.mark.parametrize("args,says", [
    (["frobnicate"], "unknown command"),
    (["up", "--port", "65536"], "--port wants a number from 0 to 65535"),
    (["up", "--port", "x"], "--port wants a number"),
    (["up", "--nodes", "0"], "--nodes wants a number from 1"),
    (["up", "--device", "tpu"], "--device is auto, cpu or cuda"),
    (["up", "--set", "nonsense"], "--set wants DAEMON.KEY=VALUE"),
    (["up", "--port"], "a value is missing after --port"),
    (["up", "--fast"], "unknown option '--fast'"),
])
def test_usage_errors(args, says, tmp_path):
    rc, _, err = run(LOCAL, *args, "--dir", tmp_path / "s") if args[-1] != "--port" else \
        run(LOCAL, *args)
    assert rc == 2 and says in err


def test_failures_name_the_cause(tmp_path):
    rc, _, err = run(LOCAL, "up", "--dir", tmp_path / "a", "--model", "/nonexistent")
    assert rc == 1 and "no model directory" in err
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    rc, _, err = run(LOCAL, "up", "--dir", tmp_path / "b", "--model", broken, "--port", "0")
    assert rc == 1 and "config.json" in err, err
    rc, _, err = run(LOCAL, "up", "--dir", tmp_path / "c", "--port", "0", "--set",
                     "kvstore.slab_bytes=12XB")
    assert rc == 1 and "12XB" in err, err
    assert not [f for f in os.listdir("/dev/shm") if str(tmp_path) in f]
    rc, out, _ = run(LOCAL, "status", "--dir", tmp_path / "c", "-o", "json")
    assert rc == 1 and json.loads(out) == []


def test_two_clusters_side_by_side_and_nothing_left():
    before = set(os.listdir("/dev/shm"))
    a = Cluster()
    b = Cluster("--nodes", "1", "--set", "kvstore.slab_bytes=8MiB")
    try:
        assert a.url != b.url
        ra, rb = a.complete("MACBETH:\n", 16), b.complete("MACBETH:\n", 16)
        assert ra["choices"][0]["text"] == rb["choices"][0]["text"]
        st = a.status()
        assert {d["daemon"] for d in st} == {"etcd", "kvstore", "prefill", "decode", "conductor"}
        assert all(d["state"] == "running" and d["grpc"] for d in st), st
        assert all(d["http"] and d["incarnation"] for d in st if d["daemon"] != "etcd"), st
        assert [d["node"] for d in st if d["daemon"] == "prefill"] == ["n1"]
        assert [d["node"] for d in st if d["daemon"] == "decode"] == ["n2"]
        rc, _, err = run(LOCAL, "up", "--dir", a.state_dir, "--port", "0")
        assert rc == 1 and "a cluster is running" in err
        pids = [d["pid"] for d in st + b.status()]
    finally:
        a.stop()
        b.stop()
    for p in pids:
        assert not os.path.exists(f"/proc/{p}") or "Z" in open(f"/proc/{p}/stat").read()
    assert set(os.listdir("/dev/shm")) <= before


def test_batonctl(cluster):
    env = dict(os.environ, BATON_ADDR=cluster.daemon("conductor")["grpc"])
    for command in ("status", "nodes", "blocks", "version"):
        rc, out, err = run(CTL, command, env=env)
        assert rc == 0 and out, (command, err)
        rc, out, err = run(CTL, command, "-o", "json", env=env)
        assert rc == 0, err
        json.loads(out)
    assert run(CTL, "frobnicate", env=env)[0] == 2
    assert run(CTL, env=env)[0] == 2
    rc, _, err = run(CTL, "--addr", "127.0.0.1:1", "status")
    assert rc == 1 and "127.0.0.1:1" in err


@pytest.mark.parametrize("daemon", ["conductor", "prefill", "decode", "kvstore"])
def test_daemons_check_their_configuration(daemon, tmp_path):
    binary = os.path.join(BUILD, "bin", f"baton-{daemon}")
    model = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
    good = ["--set", "node.id=n1", "--set", f"model.path={model}", "--check"]
    assert run(binary, *good)[0] == 0
    rc, _, err = run(binary, "--check", "--set", "node.id=n1")
    assert rc == 2 and "model.path is required" in err
    f = tmp_path / "c.yaml"
    f.write_text(f"node: {{id: n1}}\nmodel: {{path: {model}}}\nkv:\n  blocktokens: 16\n")
    rc, _, err = run(binary, "--config", f, "--check")
    assert rc == 2 and f"{f}:4: unknown key kv.blocktokens, did you mean kv.block_tokens?" in err
    rc, out, _ = run(binary, "--print-example")
    assert rc == 0 and "block_tokens" in out
    f.write_text(out.replace("  id: \n", "  id: n1\n").replace("  path: \n", f"  path: {model}\n"))
    rc, _, err = run(binary, "--config", f, "--check")
    assert rc == 0, err

"""batonctl against a running cluster, and where there is none."""
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading

import pytest

from conftest import CTL, wait_for
from restarts import SLOW_MS
from sanitizer import PATIENCE


def ctl(*args, env=None):
    e = {k: v for k, v in os.environ.items() if k not in ("BATON_ADDR", "XDG_RUNTIME_DIR")}
    e.update(env or {})
    p = subprocess.run([CTL, *args], env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60 * PATIENCE)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


@pytest.fixture
def addr(cluster):
    with open(os.path.join(cluster.state_dir, "conductor.addr")) as f:
        return f.read().strip()


def test_status(cluster, addr):
    cluster.complete("To be, or not to be", max_tokens=4)
    rc, out, err = ctl("--addr", addr, "status", "-o", "json")
    assert (rc, err) == (0, "")
    s = json.loads(out)
    assert s["serving"] is True and s["reason"] == ""
    assert s["model_id"] == cluster.model
    assert s["requests_total"] >= 1
    assert s["nodes"] == len([d for d in cluster.status() if d["daemon"] != "etcd"])
    rc, out, _ = ctl("status", "--addr=" + addr)
    assert rc == 0 and re.search(r"^serving +yes$", out, re.M)


def test_nodes(cluster, addr):
    rc, out, _ = ctl("--addr", addr, "nodes", "-o", "json")
    assert rc == 0
    by_kind = {}
    for n in json.loads(out):
        by_kind.setdefault(n["kind"], []).append(n)
    for kind, members in by_kind.items():
        want = {(d["node"], d["pid"], d["incarnation"], d["grpc"]) for d in cluster.status() if d["daemon"] == kind}
        assert {(n["node"], n["pid"], n["incarnation"], n["rpc"]) for n in members} == want
        for n in members:
            assert n["state"] == "ready"
            if kind != "conductor":
                assert n["session_up"] is True and n["silence_ms"] < 2000
    assert set(by_kind) == {"conductor", "prefill", "decode", "kvstore"}
    for n in by_kind["prefill"] + by_kind["decode"]:
        assert n["load"]["pages_total"] > 0 and n["load"]["max_model_len"] > 0
    for n in by_kind["kvstore"]:
        assert n["pool"]["slots_total"] > 0
    # The table: columns begin at the same place in every row.
    rc, out, _ = ctl("--addr", addr, "nodes")
    lines = out.splitlines()
    assert rc == 0 and len(lines) == 1 + sum(len(m) for m in by_kind.values())
    at = [m.start() for m in re.finditer(r"\S+", lines[0])]
    for line in lines[1:]:
        assert all(line[p - 1] == " " for p in at[1:]) and all(line[p] != " " for p in at)


def test_blocks(cluster, addr):
    prompt = "Enter a MESSENGER, bearing news of the blocks, " * 4

    def count():
        rc, out, _ = ctl("--addr", addr, "blocks", "-o", "json", "--limit", "10000")
        assert rc == 0
        return json.loads(out)

    before = count()["blocks"]
    r = cluster.complete(prompt, max_tokens=2)
    full = r["usage"]["prompt_tokens"] // 16
    assert full >= 3
    now = wait_for(lambda: (lambda b: b if b["blocks"] >= before + full else None)(count()), 30,
                   "the prompt's blocks are in the index")
    assert now["block_tokens"] == 16
    assert now["replicas"] >= now["blocks"] == len(now["list"])
    names = {d["node"]: "kvstore-" + d["node"] for d in cluster.status() if d["daemon"] == "kvstore"}
    for b in now["list"]:
        assert re.fullmatch("[0-9a-f]{16}", b["key"])
        assert b["kvstores"] and set(b["kvstores"]) <= set(names.values())
    rc, out, _ = ctl("--addr", addr, "blocks", "--limit", "1", "-o", "json")
    assert rc == 0 and len(json.loads(out)["list"]) == 1
    rc, out, _ = ctl("--addr", addr, "blocks", "--limit", "0")
    assert rc == 0 and len(out.splitlines()) == 1


def test_a_full_standard_output_is_no_success(cluster, addr):
    for args in (("status",), ("nodes", "-o", "json"), ("pins",), ("help",), ("--version",)):
        with open("/dev/full", "wb") as full:
            p = subprocess.run([CTL, "--addr", addr, *args], stdout=full, stderr=subprocess.PIPE, timeout=60 * PATIENCE)
        assert p.returncode == 1 and p.stderr == b"batonctl: standard output: No space left on device\n", (args, p)


def test_version(cluster, addr):
    rc, out, _ = ctl("--addr", addr, "version", "-o", "json")
    v = json.loads(out)
    assert rc == 0 and v["batonctl"] and v["conductor"] == cluster.get("/version")["version"]


def test_where_the_address_comes_from(cluster, addr):
    assert ctl("status", env={"BATON_ADDR": addr})[0] == 0
    with tempfile.TemporaryDirectory() as d:
        env = {"XDG_RUNTIME_DIR": d}
        rc, out, err = ctl("status", env=env)
        assert rc == 1 and out == "" and "--addr" in err and "BATON_ADDR" in err and d in err
        os.mkdir(f"{d}/baton-{os.getuid()}")
        with open(f"{d}/baton-{os.getuid()}/conductor.addr", "w") as f:
            f.write(addr + "\n")
        assert ctl("status", env=env)[0] == 0
        # The environment's address goes first, the option before both.
        assert ctl("status", env=dict(env, BATON_ADDR="127.0.0.1:1"))[0] == 1
        assert ctl("status", "--addr", addr, env=dict(env, BATON_ADDR="127.0.0.1:1"))[0] == 0


def test_unreachable(cluster):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound, not listening: refused
        rc, out, err = ctl("--addr", "127.0.0.1:%d" % s.getsockname()[1], "nodes")
    assert rc == 1 and out == "" and "check that the conductor runs" in err
    kv = cluster.daemon("kvstore")["grpc"]  # answers, but is no conductor
    rc, out, err = ctl("--addr", kv, "status")
    assert rc == 1 and out == "" and "not a conductor" in err


@pytest.fixture
def slow(cluster):
    """Steps take longer: streams of some hundred tokens run for longer than anything that is done to them."""
    cluster.pace(SLOW_MS)
    yield
    cluster.pace(0)


def running(cluster, n_events, max_tokens):
    """A stream that has given n_events; (its generator, the events)."""
    s = cluster.stream("/v1/completions", {"prompt": "GLOUCESTER:\nNow is the winter", "temperature": 0,
                                           "max_tokens": max_tokens, "ignore_eos": True})
    return s, [next(s) for _ in range(n_events)]


def text_of(events):
    return "".join(c["text"] for e in events if e != "[DONE]" for c in e["choices"])


def test_requests_and_explain(cluster, addr, slow):
    s, events = running(cluster, 3, 1000)
    rc, out, err = ctl("--addr", addr, "requests", "-o", "json")
    assert (rc, err) == (0, "")
    mine = [r for r in json.loads(out) if r["id"] == events[0]["id"]]
    assert len(mine) == 1 and mine[0]["state"] == "decoding" and mine[0]["tokens"] >= 3
    assert mine[0]["prefill"] and mine[0]["decode"] and mine[0]["epoch"] == 1
    rc, out, _ = ctl("--addr", addr, "requests")
    assert rc == 0 and events[0]["id"] in out and out.startswith("ID ")
    s.close()
    for args in (["--last"], [events[0]["id"]], [mine[0]["req"]]):
        rc, out, err = ctl("--addr", addr, "explain", *args, "-o", "json")
        e = json.loads(out)
        assert (rc, err) == (0, "") and e["id"] == events[0]["id"] and e["planned"] is True
        chosen = {c["for"]: c for c in e["candidates"] if c["chosen"]}
        assert chosen["prefill"]["worker"] == mine[0]["prefill"]
        assert chosen["decode"]["worker"] == mine[0]["decode"]
        assert chosen["prefill"]["ttft_ms"] >= 0 and chosen["decode"]["tbt_ms"] > 0
    wait_for(lambda: json.loads(ctl("--addr", addr, "explain", mine[0]["req"], "-o", "json")[1])["outcome"], 30, "it is over")
    e = json.loads(ctl("--addr", addr, "explain", mine[0]["req"], "-o", "json")[1])
    assert e["again"] is None and "client" in e["outcome"]["error"]
    assert e["outcome"]["tokens"] >= 3 and e["outcome"]["ttft_ms"] > 0  # as far as it came
    rc, out, _ = ctl("--addr", addr, "explain", "--last")
    assert rc == 0 and "chosen" in out and "predicted" in out and "plan       prefill and decode apart\n" in out
    # An answer to several prompts has one id; what it explains is the first of them.
    several = cluster.post("/v1/completions", {"prompt": ["king", "queen and king"], "max_tokens": 2})["id"]
    rc, out, err = ctl("--addr", addr, "explain", several, "-o", "json")
    assert (rc, err) == (0, "") and json.loads(out)["id"] == several + "-0"
    e = json.loads(out)
    assert e["tbt_ms"] == next(c["tbt_ms"] for c in e["candidates"] if c["chosen"] and c["for"] == "decode")
    rc, out, err = ctl("--addr", addr, "explain", "cmpl-nobody")
    assert rc == 1 and out == "" and "cmpl-nobody" in err
    # A finished request is not listed any more.
    wait_for(lambda: events[0]["id"] not in ctl("--addr", addr, "requests")[1], 30, "it is over")


def test_drain(cluster, addr):
    s, events = running(cluster, 1, 300)
    want = text_of(events + list(s))
    rc, out, err = ctl("--addr", addr, "drain", "n7")
    assert rc == 1 and out == "" and "n7" in err and "n1" in err and "n2" in err
    cluster.pace(SLOW_MS)
    s, events = running(cluster, 10, 300)
    try:
        rc, out, err = ctl("--addr", addr, "drain", "n2", "-o", "json")
        assert rc == 1 and out == "" and "draining n2 would stop the last worker for decode" in err and "--force" in err, err
        assert not any(n["draining"] for n in json.loads(ctl("--addr", addr, "nodes", "-o", "json")[1]))
        rc, out, err = ctl("--addr", addr, "drain", "n2", "--force", "-o", "json")
        d = json.loads(out)
        assert (rc, err) == (0, "") and d["draining"] is True and d["stays"] is False
        assert any(m.startswith("kvstore/") for m in d["members"])
        rc, out, _ = ctl("--addr", addr, "nodes", "-o", "json")
        assert {n["node"] for n in json.loads(out) if n["draining"]} == {"n2"}

        def moved():
            rows = json.loads(ctl("--addr", addr, "requests", "-o", "json")[1])
            return [r for r in rows if r["id"] == events[0]["id"] and r["epoch"] == 2
                    and "n2" not in r["prefill"] + r["decode"]]

        wait_for(moved, 30, "the stream has moved")
        cluster.pace(0)
        rc, out, err = ctl("--addr", addr, "drain", "n1")
        assert rc == 1 and "new requests would get 503" in err, err
        rc, out, _ = ctl("--addr", addr, "drain", "n1", "--force")
        assert rc == 0 and "stay there" in out  # nobody is left who could take it
        status, _, body = cluster.request("GET", "/health")
        assert status == 503 and b"batonctl undrain" in body
        # What comes now waits, and is served as soon as somebody may.
        done = []
        t = threading.Thread(target=lambda: done.append(cluster.complete("x", 2)["usage"]["completion_tokens"]))
        t.start()
        wait_for(lambda: [r for r in json.loads(ctl("--addr", addr, "requests", "-o", "json")[1]) if r["epoch"] == 0], 30,
                 "the new request waits")
        assert not done
        assert ctl("--addr", addr, "undrain", "n1")[0] == 0
        t.join()
        assert done == [2]
        events += list(s)  # what was under way has gone on meanwhile
        assert events[-1] == "[DONE]" and text_of(events) == want
    finally:
        cluster.pace(0)
        s.close()
        for node in ("n1", "n2"):
            assert ctl("--addr", addr, "undrain", node)[0] == 0
    rc, out, _ = ctl("--addr", addr, "nodes", "-o", "json")
    assert not any(n["draining"] for n in json.loads(out))


@pytest.mark.parametrize("args", [
    [], ["frobnicate"], ["status", "nodes"], ["status", "-o", "yaml"], ["status", "-o"], ["--addr"],
    ["--addr", "nocolon", "status"], ["blocks", "--limit", "-1"], ["blocks", "--limit", "x"], ["--nope"],
    ["drain"], ["undrain"], ["undrain", "n1", "--force"], ["explain"], ["explain", ""], ["explain", "x", "--last"], ["drain", "n1", "--last"],
    ["requests", "x"], ["drain", "n1", "n2"],
])
def test_usage(args):
    rc, out, err = ctl(*args)
    assert rc == 2 and out == "" and err


def test_help():
    for args in (["--help"], ["-h"], ["help"]):
        rc, out, err = ctl(*args)
        assert rc == 0 and err == ""
        for word in ("status", "nodes", "blocks", "requests", "explain", "drain", "undrain", "version", "--addr", "BATON_ADDR", "json"):
            assert word in out
    for args in (["drain", "--help"], ["-h", "drain"], ["help", "drain"]):
        rc, out, err = ctl(*args)
        assert (rc, err) == (0, "") and out.startswith("usage: batonctl drain NODE") and "--force" in out and "--ttl" not in out
    assert ctl("help", "frobnicate")[0] == 2


def test_an_option_of_another_command_is_refused():
    for args in (["nodes", "--force"], ["status", "--ttl", "1h"], ["status", "--sort", "NAME"], ["drain", "n1", "--watch"],
                 ["explain", "--last=yes"], ["status", "--watch=0"], ["status", "--watch=x"]):
        rc, out, err = ctl("--addr", "127.0.0.1:1", *args)
        name = next(a for a in args if a.startswith("--")).split("=")[0]
        assert rc == 2 and out == "" and (name in err or "takes no value" in err), (args, err)


def test_sorted_tables(cluster, addr):
    def column(title, *args):
        rc, out, err = ctl("--addr", addr, "nodes", *args)
        assert (rc, err) == (0, "")
        lines = out.splitlines()
        at = lines[0].index(title)
        return [line[at:].split()[0] for line in lines[1:]]

    kinds = column("KIND")
    assert kinds == sorted(kinds, key=["conductor", "prefill", "decode", "kvstore"].index)
    assert column("NODE", "--sort", "node") == sorted(column("NODE"))
    assert column("NODE", "--sort", "-NODE") == sorted(column("NODE"), reverse=True)
    assert set(column("HTTP")) == {d["http"] for d in cluster.status() if d["daemon"] != "etcd"}
    rc, out, err = ctl("--addr", addr, "nodes", "--sort", "COLOUR")
    assert rc == 2 and out == "" and "COLOUR" in err


def test_watch(cluster, addr):
    """Again and again, until it is interrupted: one JSON document behind the other, or a table."""
    p = subprocess.Popen([CTL, "--addr", addr, "status", "--watch=0.1", "-o", "json"], stdout=subprocess.PIPE, text=True)
    decoder, text, docs = json.JSONDecoder(), "", []
    while len(docs) < 3:
        line = p.stdout.readline()
        assert line, "batonctl has ended"
        text += line
        try:
            doc, end = decoder.raw_decode(text)
        except ValueError:
            continue
        docs.append(doc)
        text = text[end:].lstrip()
    p.send_signal(signal.SIGINT)
    p.stdout.read()
    p.stdout.close()
    assert p.wait(60 * PATIENCE) == 0 and all(d["serving"] for d in docs)


def test_top(cluster, addr, slow):
    rc, out, err = ctl("--addr", addr, "top")  # no terminal: one picture
    names = {d["node"] for d in cluster.status()}
    assert (rc, err) == (0, "") and "serving yes" in out and "\033" not in out and all(n in out for n in names)
    # On a terminal: a picture each second, on a screen of its own, until q; a stream's tokens are seen to grow.
    s, events = running(cluster, 1, 1000)
    main, side = pty.openpty()
    p = subprocess.Popen([CTL, "--addr", addr, "top", "--watch=0.2"], stdin=side, stdout=side, stderr=side)
    seen = b""
    try:
        while seen.count(b"serving yes") < 3:
            seen += os.read(main, 65536)
        os.write(main, b"q")
        while b"\033[?1049l" not in seen:
            seen += os.read(main, 65536)
        assert p.wait(60 * PATIENCE) == 0
    finally:
        p.kill()
        os.close(main)
        os.close(side)
        s.close()
    text = seen.decode()
    rows = [line.split() for line in text.splitlines() if line.startswith(events[0]["id"])]
    assert len(rows) >= 2 and text.startswith("\033[?1049h"), text
    rate = [float(r[6]) for r in rows[1:]]  # ID, state, age, s, prompt, tokens, tokens/s
    assert max(rate) > 0


def test_a_worker_that_loads_says_how_far_it_is(cluster, addr, tmp_path):
    """A model of another size than the cluster's: it takes seconds to load, and stands still while somebody looks."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    shutil.copy(os.path.join(root, "deploy/shapes/GPT-2/config.json"), tmp_path)
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(os.path.join(root, "deploy/models/shakespeare-llama-6m", name), tmp_path)
    conf = next(f for f in sorted(os.listdir(cluster.state_dir + "/conf")) if f.startswith("decode"))
    with open(tmp_path / "log", "w") as log:
        p = subprocess.Popen([os.path.join(os.path.dirname(CTL), "baton-decode"), "--config", f"{cluster.state_dir}/conf/{conf}",
                              "--set", "worker.index=7", "--set", "engine.mem=64MiB", "--set", f"model.path={tmp_path}",
                              "--set", "model.load_format=dummy"], stdout=log, stderr=log)

    def stopped(ask):
        os.kill(p.pid, signal.SIGSTOP)
        try:
            return ask()
        finally:
            os.kill(p.pid, signal.SIGCONT)

    def starting():
        return [s for s in json.loads(ctl("--addr", addr, "status", "-o", "json")[1])["starting"] if s["name"].endswith("-7")]

    try:
        def loads():
            s = starting()
            return s and s[0]["what"] == "weights" and s[0]["percent"] > 0 and (s[0], ctl("--addr", addr, "nodes"))

        seen, (rc, out, _) = wait_for(lambda: stopped(loads), 60, "it loads", every_s=0.02)
        assert seen["kind"] == "decode" and seen["http"].startswith("127.0.0.1:")
        assert rc == 0 and re.search(r"^STARTING +NAME", out, re.M) and seen["name"] in out
        p.terminate()
        p.wait(60 * PATIENCE)
        wait_for(lambda: not starting(), 30, "its record is gone")
    finally:
        p.kill()
        p.wait()

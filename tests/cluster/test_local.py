"""baton-local and batonctl as a user meets them: usage, several clusters, nothing left behind."""
import ctypes
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request

import pytest

from conftest import BUILD, CTL, LOCAL, ROOT, Cluster, port_of_nobody, scrape, wait_for
from local_cluster import start_time


def run(*args, env=None):
    env = dict(env or os.environ, BATON_BIN=os.path.join(BUILD, "bin"))
    p = subprocess.run([str(a) for a in args], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, timeout=120)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


@pytest.mark.parametrize("args,says", [
    (["frobnicate"], "unknown command"),
    (["up", "--port", "65536"], "--port needs a number from 0 to 65535"),
    (["up", "--port", "x"], "--port needs a number"),
    (["up", "--nodes", "0"], "--nodes needs a number from 1"),
    (["up", "--device", "tpu"], "--device is auto, cpu or cuda"),
    (["up", "--load-format", "gguf"], "--load-format is auto or dummy"),
    (["up", "--set", "nonsense"], "--set needs DAEMON.KEY=VALUE"),
    (["up", "--port"], "a value is missing after --port"),
    (["up", "--fast"], "unknown option '--fast'"),
    (["up", "--model", ""], "--model needs a directory"),
    (["up", "--model="], "--model needs a directory"),
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


def left_of(state):
    """Processes whose command line names this state directory."""
    out = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if str(state).encode() + b"/" in f.read():
                    out.append(int(pid))
        except OSError:
            pass
    return out


def test_directories_and_ports_that_cannot_be_used(tmp_path):
    long = tmp_path / ("d" * 100)
    rc, _, err = run(LOCAL, "up", "--dir", long, "--port", "0")
    assert rc == 1 and "too long for UNIX sockets" in err and "--dir" in err
    file = tmp_path / "file"
    file.write_text("")
    rc, _, err = run(LOCAL, "up", "--dir", file / "x", "--port", "0")
    assert rc == 1 and f"cannot write to {file}/x" in err and "--dir" in err
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
        rc, _, err = run(LOCAL, "up", "--dir", tmp_path / "p", "--port", port)
        assert rc == 1 and f"port {port} is in use; choose another with --port" in err
    rc, _, err = run(LOCAL, "up", "--dir", tmp_path / "m", "--model", file)
    assert rc == 1 and f"there is no model directory {file}" in err
    assert not left_of(tmp_path)


def test_state_directories_of_strangers(tmp_path):
    """A link or directory that somebody else prepared is neither followed, emptied nor changed."""
    home = tmp_path / "home"
    (home / "tls").mkdir(parents=True)
    (home / "tls" / "mine").write_text("precious")
    (home / "procs").write_text("")
    home.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(home)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    below = shared / "below"
    below.mkdir()
    for command in ("up", "down", "status"):
        for state, says in ((link, "is a symbolic link"), (shared, "others may write to"), (below, "others may write to")):
            rc, _, err = run(LOCAL, command, "--dir", state, *(["--port", "0"] if command == "up" else []))
            assert rc == 1 and says in err and "--dir" in err, (command, state, err)
    rc, _, err = run(LOCAL, "up", "--tls", "--dir", home, "--port", "0")
    assert rc == 1 and "has files that are not baton-local's" in err and "--dir" in err
    rc, _, err = run(LOCAL, "down", "--dir", home)  # it has a procs, but baton-local did not make it
    assert rc == 0 and "no cluster in" in err
    assert (home / "tls" / "mine").read_text() == "precious" and (home / "procs").exists()
    assert home.stat().st_mode & 0o777 == 0o755 and link.is_symlink()
    assert not os.listdir(below) and os.listdir(shared) == ["below"]


def test_a_tiny_state_directory(tmp_path):
    script = f"mount -t tmpfs -o size=8m none {tmp_path} && exec {LOCAL} up --port 0 --dir {tmp_path}/s"
    rc, _, err = run("unshare", "-m", "sh", "-c", script)
    if "unshare" in err or "mount:" in err:
        pytest.skip("no mount namespaces here")
    assert rc == 1 and re.search(r"s has \d MiB free; etcd and the logs need 160 MiB; free some", err), err


def test_one_worker_is_a_whole_cluster():
    """Nothing waits for a worker of the other role."""
    c = Cluster("--prefill", "0", "--nodes", "1")
    try:
        assert c.request("GET", "/health")[0] == 200
        assert c.complete("ROMEO:\n", 4)["usage"]["completion_tokens"] == 4
    finally:
        c.stop()


def test_the_last_line_names_the_cause(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
        for form in ("logfmt", "json"):
            rc, _, err = run(LOCAL, "up", "--dir", tmp_path, "--port", "0", "--set", f"all.log.format={form}",
                             "--set", f"conductor.conductor.http.listen=127.0.0.1:{port}")
            last = err.strip().splitlines()[-1]
            assert rc == 1 and "conductor on n1 ended" in last and str(port) in last and "conductor.log" in last, err


class SchedAttr(ctypes.Structure):
    """struct sched_attr of Linux, 48 bytes of it."""
    _fields_ = [("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64),
                ("nice", ctypes.c_int32), ("priority", ctypes.c_uint32), ("slice_ns", ctypes.c_uint64),
                ("rest", ctypes.c_uint64 * 2)]


def slice_ns(tid):
    """Of a thread; 0 before Linux 6.12; None: it has ended."""
    a, sched_getattr = SchedAttr(), 315
    if ctypes.CDLL(None, use_errno=True).syscall(sched_getattr, tid, ctypes.byref(a), 48, 0) != 0:
        assert ctypes.get_errno() == errno.ESRCH
        return None
    return a.slice_ns


def test_tokens_do_not_wait_for_those_that_compute(cluster):
    """One session of their own, as autogroup would let each wait behind the others; short time slices for who hands on."""
    daemons = cluster.status()
    sessions = {os.getsid(d["pid"]) for d in daemons}
    assert len(sessions) == 1 and os.getsid(0) not in sessions, sessions
    default = slice_ns(os.getpid())
    masks = min(max(len(os.sched_getaffinity(0)) // 4, 1), 8)  # a worker's mask threads, which its engine waits for
    for d in daemons:
        if d["daemon"] in ("conductor", "prefill", "decode") and default:
            want = 2 if d["daemon"] == "conductor" else 2 + masks  # the control loop, gRPC's queue

            def short():
                """Threads with a short slice. One takes it when it runs for the first time."""
                return sum(0 < (slice_ns(int(t)) or 0) < default for t in os.listdir(f"/proc/{d['pid']}/task"))
            wait_for(lambda: short() >= want and slice_ns(d["pid"]) < default, 60, f"{want} threads of {d} have short slices")
            assert short() == want, d


def test_down_twice_and_status_of_nothing(tmp_path):
    for _ in range(2):
        rc, out, err = run(LOCAL, "down", "--dir", tmp_path / "none")
        assert (rc, out) == (0, "") and "no cluster in" in err
    rc, _, err = run(LOCAL, "status", "--dir", tmp_path / "none")
    assert rc == 1 and "no cluster in" in err


def start_up(state):
    env = dict(os.environ, BATON_BIN=os.path.join(BUILD, "bin"))
    return subprocess.Popen([LOCAL, "up", "--dir", str(state), "--port", "0"], env=env, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.parametrize("says", [b"starting etcd", b"starting 2 kvstore"])
def test_interrupted_in_the_middle(tmp_path, says):
    """Ctrl-C goes to the whole process group, at the moment when baton-local has said `says`."""
    p = start_up(tmp_path)
    seen = b""
    while says not in seen:
        piece = os.read(p.stdout.fileno(), 4096)
        assert piece, seen
        seen += piece
    time.sleep(0.1)
    os.killpg(p.pid, signal.SIGINT)
    out = seen + p.communicate(timeout=120)[0]
    # Where it was faster than the signal the cluster serves, and is stopped as any other.
    if p.returncode == 0:
        assert run(LOCAL, "down", "--dir", tmp_path)[0] == 0
    else:
        assert p.returncode == 130 and b"interrupted" in out, (p.returncode, out)
    assert not left_of(tmp_path)
    rc, out, err = run(LOCAL, "up", "--dir", tmp_path, "--port", "0")
    assert rc == 0 and out.startswith("http://"), err
    assert run(LOCAL, "down", "--dir", tmp_path)[0] == 0 and not left_of(tmp_path)


def test_two_ups_at_once_make_one_cluster(tmp_path):
    ups = [start_up(tmp_path) for _ in range(2)]
    outs = [p.communicate(timeout=120)[0].decode() for p in ups]
    try:
        assert sorted(p.returncode for p in ups) == [0, 1], outs
        loser = outs[0] if ups[0].returncode else outs[1]
        assert "another baton-local is starting" in loser or "a cluster is running" in loser, loser
        rc, out, _ = run(LOCAL, "status", "--dir", tmp_path, "-o", "json")
        assert rc == 0 and len(json.loads(out)) == 6
    finally:
        assert run(LOCAL, "down", "--dir", tmp_path)[0] == 0
    assert not left_of(tmp_path)


def test_no_room_in_shared_memory(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a small /dev/shm needs a mount namespace")
    script = (f"mount -t tmpfs -o size=64k tmpfs /dev/shm && {LOCAL} up --dir {tmp_path} --port 0; "
              f"echo rc=$?; ls /dev/shm")
    env = dict(os.environ, BATON_BIN=os.path.join(BUILD, "bin"))
    p = subprocess.run(["unshare", "-m", "bash", "-c", script], env=env, stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    out = p.stdout.decode()
    if "unshare" in out:
        pytest.skip("no mount namespaces here: " + out.strip())
    assert out.endswith("rc=1\n") and "kvstore.slab_bytes" in out, out
    assert not left_of(tmp_path)


def test_dummy_weights_need_no_checkpoint(tmp_path):
    """Random weights of a config's shape: for trying a shape, and for benchmarks."""
    model = tmp_path / "shape"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(ROOT, "deploy/models/shakespeare-llama-6m", name), model)
    c = Cluster("--model", str(model), "--load-format", "dummy")
    try:
        assert c.model == "shape"
        a, b = (c.complete("ROMEO:", 8, ignore_eos=True)["choices"] for _ in range(2))
        assert a == b and a[0]["finish_reason"] == "length"
    finally:
        c.stop()


def test_up_waits_for_all_it_was_asked_for_on_ipv6_too(tmp_path):
    """Odd names as well: a path with a blank, a model whose name needs escaping in /metrics."""
    try:
        port = port_of_nobody("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    model, state = tmp_path / 'a "model" {x}', tmp_path / "a state"
    shutil.copytree(os.path.join(ROOT, "deploy/models/shakespeare-draft-1m"), model)
    rc, out, err = run(LOCAL, "up", "--dir", state, "--model", model, "--prefill", "2", "--decode", "2",
                       "--set", f"conductor.conductor.http.listen=[::1]:{port}", "--set", "all.rpc.listen=[::1]:0")
    try:
        assert rc == 0 and out.strip() == f"http://[::1]:{port}", err
        text = urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=30).read().decode()
        assert 'baton_sessions_up{kind="worker"} 4' in text and 'baton_sessions_up{kind="kvstore"} 2' in text
        assert 'model_name="a \\"model\\" {x}"' in text
    finally:
        assert run(LOCAL, "down", "--dir", state)[0] == 0


def test_one_name_and_right_sums():
    """The served name reaches every daemon, and sums over all daemons count a request and its tokens once."""
    c = Cluster("--model", os.path.join(ROOT, "deploy/models/shakespeare-draft-1m"), "--set", "all.model.served_name=shop/7b")
    try:
        assert c.model == "shop/7b"
        usage = c.complete("To be, or not to be", 20, ignore_eos=True, n=2)["usage"]
        daemons = [d for d in c.status() if d["http"]]

        def scraped():
            sums = {}
            for d in daemons:
                for name, v in scrape(d["http"]).items():
                    assert "model_name" not in name or 'model_name="shop/7b"' in name, (d, name)
                    key = name.split("{")[0]
                    sums[key] = sums.get(key, 0) + v
            return sums
        # The conductor counts the request when its client has had the answer, so perhaps a moment later.
        wait_for(lambda: scraped()["vllm:request_success_total"], 60, "the request is counted")
        sums = scraped()
        assert {d["daemon"] for d in daemons} >= {"conductor", "prefill", "decode"}
        assert sums["vllm:generation_tokens_total"] == usage["completion_tokens"] == 40
        assert sums["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
        assert sums["vllm:request_success_total"] == 1
        assert sums["vllm:request_queue_time_seconds_count"] == 1
        assert sums["vllm:time_to_first_token_seconds_count"] >= 1
        with open(os.path.join(c.state_dir, "conductor.addr")) as f:
            rc, out, _ = run(CTL, "--addr", f.read().strip(), "status")
        assert rc == 0 and re.search("^model +shop/7b$", out, re.M), out
        for name in ("conductor", "prefill", "decode"):
            log = c.logs()
            assert "model=shop/7b" in log.split(f"== {name}")[1].split("\n== ")[0], log
    finally:
        c.stop()


def shared_memory_of(cluster):
    """Files in /dev/shm; those of other clusters come and go."""
    with open(os.path.join(cluster.state_dir, "conf", "kvstore-n1.yaml")) as f:
        name = re.search(r"local-\d+", f.read()).group()
    return lambda: [f for f in os.listdir("/dev/shm") if name in f]


def test_two_clusters_side_by_side_and_nothing_left():
    a = Cluster()
    b = Cluster("--nodes", "1", "--set", "kvstore.slab_bytes=8MiB")
    left = [shared_memory_of(a), shared_memory_of(b)]
    try:
        assert [len(f()) for f in left] == [2, 1]
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
    assert not [p for p in pids if start_time(p)]
    assert [f() for f in left] == [[], []]


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
    wrong = {"conductor": ["conductor.name=a b"], "kvstore": ["kvstore.eviction=none"]}
    for bad in wrong.get(daemon, ["engine.device=tpu", "engine.max_slots=4096", "worker.name=a"]):
        rc, _, err = run(binary, *good, "--set", bad)
        assert rc == 2 and (bad.split("=")[0] in err) and len(err.splitlines()) == 1, (bad, err)
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

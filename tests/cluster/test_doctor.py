"""batonctl doctor and batonctl debug: what they find of a sound cluster and of faults, and what they give away."""
import base64
import contextlib
import ctypes
import glob
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import tempfile
import threading

import pytest

from conftest import CTL, Cluster, port_of_nobody, wait_for

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")


def doctor(*args):
    p = subprocess.run([CTL, "doctor", *args, "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    return p.returncode, json.loads(p.stdout), p.stderr


def faults(found):
    return [f for f in found if f["level"] == "fault"]


def test_a_sound_cluster_has_no_fault(cluster):
    rc, found, _ = doctor("--dir", cluster.state_dir)
    mine = {d["pid"] for d in cluster.status() if d["daemon"] != "etcd"}
    of = [int(f["what"].split("[")[1].split("]")[0]) if "[" in f["what"] else None for f in found]
    assert mine <= set(of)
    found = [f for f, pid in zip(found, of) if pid in mine | {None}]  # tests beside this one may run daemons of the same build
    assert faults(found) == []
    said = {f["what"].split(" ", 1)[1]: f for f in found if f["what"].startswith("kvstore[")}
    assert {"configuration", "slab", "etcd"} <= set(said) and "answers a read in" in said["etcd"]["text"]
    assert any(f["what"] == "cluster" and f["level"] == "ok" and cluster.model in f["text"] for f in found)
    assert all(f["remedy"] for f in found if f["level"] in ("fault", "warning"))


def test_faults_of_a_configuration(tmp_path):
    spare = port_of_nobody()
    with socket.socket() as s, socket.socket() as gone:
        s.bind(("127.0.0.1", 0))
        s.listen()
        gone.bind(("127.0.0.1", 0))  # bound, not listening: refused
        taken, nobody = s.getsockname()[1], gone.getsockname()[1]
        (tmp_path / "kvstore.yaml").write_text(
            f"node: {{id: a}}\nmodel: {{path: {MODEL}}}\nrpc: {{listen: '127.0.0.1:{taken}'}}\nhttp: {{listen: '127.0.0.1:{spare}'}}\n"
            f"etcd: {{endpoints: ['127.0.0.1:{nobody}']}}\nkvstore: {{slab_bytes: 9TiB}}\n")
        (tmp_path / "decode.yaml").write_text("node: {id: a}\nmodel: {path: /nowhere}\nno_such: 1\n")
        rc, found, err = doctor("--addr", f"127.0.0.1:{nobody}", "--config", str(tmp_path))
    by = {f["what"]: f["text"] for f in faults(found)}
    assert {"level": "ok", "what": "kvstore http.listen", "text": f"127.0.0.1:{spare} is free", "remedy": None} in found, found
    assert rc == 1 and "9TiB" in by["kvstore slab"] and "Address already in use" in by["kvstore rpc.listen"]
    assert f"127.0.0.1:{nobody} does not answer" in by["kvstore etcd"] and "no_such" in by["decode configuration"]
    assert f"127.0.0.1:{nobody}" in by["cluster"] and "batonctl:" in err


def test_a_certificate_that_ends_soon(tmp_path):
    certs = os.path.join(ROOT, "deploy", "local", "baton-certs")
    for args in (["ca"], ["--days", "3", "node", "n1", "kvstore"]):
        subprocess.run([certs, "--dir", str(tmp_path), "--cluster", "prod", *args], check=True, stdout=subprocess.DEVNULL)
    cert = next(f for f in os.listdir(tmp_path) if f.endswith(".crt") and f != "ca.crt")
    at = {"ca": tmp_path / "ca.crt", "cert": tmp_path / cert, "key": (tmp_path / cert).with_suffix(".key")}
    (tmp_path / "kvstore.yaml").write_text(
        f"cluster: {{name: prod, tls: {{ca: {at['ca']}, cert: {at['cert']}, key: {at['key']}}}}}\n"
        f"node: {{id: n1}}\nmodel: {{path: {MODEL}}}\netcd: {{endpoints: ['127.0.0.1:1']}}\n")
    _, found, _ = doctor("--addr", "127.0.0.1:1", "--config", str(tmp_path))
    tls = [f for f in found if f["what"] == "kvstore cluster.tls"]
    assert len(tls) == 1 and tls[0]["level"] == "warning" and cert in tls[0]["text"] and "baton-certs" in tls[0]["remedy"]


def test_values_are_printed_as_they_are_in_force(tmp_path):
    conf = tmp_path / "d.yaml"
    conf.write_text(f"node: {{id: a}}\nmodel: {{path: {MODEL}}}\nkvstore: {{slab_bytes: 1GiB}}\n")
    program = os.path.join(os.path.dirname(CTL), "baton-kvstore")
    p = subprocess.run([program, "--config", str(conf), "--set", "kvstore.slab_bytes=3GiB", "--print-values"], stdout=subprocess.PIPE,
                       text=True, check=True, timeout=60, env=dict(os.environ, BATON_KVSTORE_PIN_MAX="0.5"))
    values = dict(line.split(": ", 1) for line in p.stdout.splitlines())
    assert values["kvstore.slab_bytes"] == "3GiB" and values["kvstore.pin_max"] == "0.5" and values["etcd.endpoints"] == "127.0.0.1:2379"
    assert values["node.id"] == "a" and values["kvstore.ssd.path"] == ""


def test_a_bundle_says_much_and_gives_no_prompt_away(cluster, tmp_path):
    secret = "Rosencrantz keeps the treasure under the willow"
    answer = cluster.complete(secret, max_tokens=8)["choices"][0]["text"]
    archive, before = tmp_path / "b:undle.tar.gz", set(glob.glob("/tmp/batonctl-*"))
    p = subprocess.run([CTL, "--dir", cluster.state_dir, "debug", "--file", str(archive)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       text=True, timeout=300)
    assert p.returncode == 0 and p.stdout.strip() == str(archive), p.stderr
    assert os.stat(archive).st_mode & 0o077 == 0
    with tarfile.open(archive) as t:
        files = {os.path.basename(m.name): t.extractfile(m).read().decode() for m in t.getmembers() if m.isfile()}
        assert len({m.name.split("/")[0] for m in t.getmembers()}) == 1
    assert json.loads(files["status.json"])["serving"] is True
    for d in cluster.status():
        if d["daemon"] != "etcd":
            assert any(f.startswith(f"values-{d['daemon']}-{d['pid']}") for f in files)
    names = [n["name"] for n in json.loads(files["nodes.json"])]
    assert all("baton_" in files[f"metrics-{n}.txt"] for n in names)
    assert any(f.startswith("log-") and "ev=ready" in text for f, text in files.items())
    for text in files.values():
        assert secret not in text and "willow" not in text and (len(answer.strip()) < 8 or answer.strip() not in text)
    # It leaves no folder behind. One that goes away was another batonctl's.
    wait_for(lambda: not any(contents(f) for f in set(glob.glob("/tmp/batonctl-*")) - before), 60, "its folder is gone")


def contents(folder):
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def test_a_bundle_that_cannot_be_written(cluster, tmp_path):
    p = subprocess.run([CTL, "--dir", cluster.state_dir, "debug", "--file", str(tmp_path / "none" / "x.tar.gz")],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    assert p.returncode == 1 and p.stdout == "" and "was not written" in p.stderr and "No such file" in p.stderr


def test_a_bundle_is_always_a_new_file(cluster, tmp_path):
    """In a folder of several users, somebody may have put a link where root is about to write."""
    mine, link = tmp_path / "mine", tmp_path / "x.tar.gz"
    mine.write_text("precious")
    link.symlink_to(mine)
    p = subprocess.run([CTL, "--dir", cluster.state_dir, "debug", "--file", str(link)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       text=True, timeout=300)
    assert p.returncode == 1 and p.stdout == "" and "it exists" in p.stderr and mine.read_text() == "precious"


def run_as(uid, program, argv, environ):
    """In a child: becomes another user, then runs a program with exactly these texts. A text of the environment without '=' is
    no variable, but the kernel takes it."""
    def list_of(texts):
        return (ctypes.c_char_p * (len(texts) + 1))(*[t.encode() for t in texts], None)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.chdir("/")
    ctypes.CDLL(None, use_errno=True).execve(program.encode(), list_of(argv), list_of(environ))
    sys.exit(1)


def full_pipe():
    """(end to read, end to write) of a pipe in which there is no room."""
    out, to = os.pipe()
    os.set_blocking(to, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(to, b"x" * 4096)
    os.set_blocking(to, True)
    return out, to


@contextlib.contextmanager
def a_daemon_of(uid, environ):
    """A process of a kvstore's program beside a batonctl, with any user and environment. It lives because nobody reads what it
    prints. Then the program is replaced by one that writes down how it was called, in the file `called`. Yields the folder and
    the process."""
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as d:
        os.chmod(d, 0o755)
        program = os.path.join(d, "baton-kvstore")
        for name in ("batonctl", "baton-kvstore"):
            shutil.copy(os.path.join(os.path.dirname(CTL), name), d)
        os.symlink(os.path.join(os.path.dirname(os.path.dirname(CTL)), "lib"), os.path.join(d, "lib"))
        pipe = full_pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(pipe[1], 1)
            run_as(uid, program, [program, "--print-example"], environ)
        try:
            wait_for(lambda: os.readlink(f"/proc/{pid}/exe") == program, 60, "the program runs")
            os.unlink(program)
            with open(program, "w") as f:
                f.write(f"#!/bin/sh\necho \"$@\" >>{d}/called\ntr '\\0' '\\n' </proc/$$/environ >>{d}/called\n")
            os.chmod(program, 0o755)
            yield d, pid
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            for end in pipe:
                os.close(end)


def lines_of(path):
    with contextlib.suppress(FileNotFoundError), open(path) as f:
        return f.read().splitlines()
    return []


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root looks at processes of other users")


@needs_root
@pytest.mark.parametrize("environ", [["BATON_x/run"], ["BATON_NODE_ID=a"]])
def test_root_runs_nothing_that_another_user_names(environ):
    """Any user can run a daemon's program, with any arguments and any texts in place of its environment."""
    with a_daemon_of(65534, environ) as (d, pid):
        os.mkdir(os.path.join(d, "BATON_x"))
        bait = os.path.join(d, "BATON_x", "run")
        with open(bait, "w") as f:
            f.write(f"#!/bin/sh\nid -u >>{d}/ran\n")
        os.chmod(bait, 0o755)
        p = subprocess.run([os.path.join(d, "batonctl"), "doctor", "--addr", "127.0.0.1:1", "-o", "json"], cwd=d, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, timeout=300)
        assert lines_of(f"{d}/ran") == [] and lines_of(f"{d}/called") == []
        said = [f for f in json.loads(p.stdout) if f["what"].startswith(f"kvstore[{pid}]")]
        assert [(f["level"], "user 65534" in f["text"]) for f in said] == [("note", True)] and "as that user" in said[0]["remedy"]


def test_the_environment_of_a_daemon_is_no_argument(tmp_path):
    """Everybody can read the arguments of a process, but only its user the environment. The program env, if batonctl used it,
    would write down what it gets."""
    with a_daemon_of(os.geteuid(), ["BATON_API_KEY=sk-hush", "BATON_NODE_ID=a"]) as (d, _):
        fake = tmp_path / "env"
        fake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/said\n')
        fake.chmod(0o755)
        subprocess.run([os.path.join(d, "batonctl"), "doctor", "--addr", "127.0.0.1:1"], stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, env=dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}"), timeout=300)
        called = lines_of(f"{d}/called")
        assert lines_of(tmp_path / "said") == [] and called[0] == "--print-values --print-example", called
        assert "BATON_API_KEY=sk-hush" in called and "BATON_NODE_ID=a" in called
        assert not [line for line in called if line.startswith("--") and "hush" in line]


def test_names_cannot_move_the_cursor(tmp_path):
    (tmp_path / "\x1b[2J").mkdir()
    (tmp_path / "kvstore.yaml").write_text(f"node: {{id: a}}\nmodel: {{path: {MODEL}}}\netcd: {{endpoints: ['127.0.0.1:1']}}\n"
                                           f'kvstore: {{slab_bytes: 9TiB, slab_path: "{tmp_path}/\\e[2J/slab"}}\n')
    p = subprocess.run([CTL, "doctor", "--addr", "127.0.0.1:1", "--config", str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=300)
    assert "9TiB" in p.stdout and "/?[2J" in p.stdout and "\x1b" not in p.stdout


class Trap(http.server.BaseHTTPRequestHandler):
    """Writes down the headers of those who ask."""
    def do_GET(self):
        self.server.heard.append(dict(self.headers))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def a_false_conductor(state):
    """Whoever may write to etcd, as every daemon may, adds the record of a conductor, and serves HTTPS there with a certificate
    that curl believes."""
    tls = f"{state}/tls"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trap)
    server.heard = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{tls}/http/tls.crt", f"{tls}/http/tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"127.0.0.1:{server.server_port}"
    with open(f"{state}/conf/kvstore-n1.yaml") as f:
        conf = f.read()
    etcd, name = re.search(r"https://(127[0-9.:]+)", conf).group(1), re.search(r"cluster: {name: ([^,}]+)", conf).group(1)
    record = b"".join(bytes([n << 3 | 2, len(v)]) + v.encode() for n, v in ((1, "conductor"), (2, "false"), (3, "n9"), (6, at), (7, at)))
    record += bytes([4 << 3 | 1]) + b"\1" * 8
    put = {"key": base64.b64encode(f"/baton/{name}/members/conductor/false".encode()).decode(), "value": base64.b64encode(record).decode()}
    subprocess.run(["curl", "-sSf", "--cacert", f"{tls}/ca.crt", "--cert", f"{tls}/n1-kvstore.crt", "--key", f"{tls}/n1-kvstore.key",
                    f"https://{etcd}/v3/kv/put", "-d", json.dumps(put)], check=True, stdout=subprocess.DEVNULL, timeout=30)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_a_bundle_of_a_cluster_with_https_and_keys(tmp_path):
    c = Cluster("--tls", "--keys")
    try:
        keys, mine = f"{c.state_dir}/keys/api-keys", tmp_path / "key"
        made = subprocess.run([CTL, "key", "add", "--file", keys, "--id", "both", "--scope", "admin,metrics"], stdout=subprocess.PIPE,
                              check=True, timeout=60)
        mine.write_bytes(made.stdout)
        mine.chmod(0o600)
        ask = [CTL, "--dir", c.state_dir, "--key-file", str(mine)]
        wait_for(lambda: subprocess.run(ask + ["status"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0, 60,
                 "the key is known")
        archive = tmp_path / "b.tar.gz"
        with a_false_conductor(c.state_dir) as trap:
            wait_for(lambda: "false" in subprocess.run(ask + ["nodes"], stdout=subprocess.PIPE, text=True).stdout, 60, "its record is known")
            subprocess.run(ask + ["debug", "--file", str(archive)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=300)
        assert trap.heard and not [h for h in trap.heard if "Authorization" in h]
        with tarfile.open(archive) as t:
            files = {os.path.basename(m.name): t.extractfile(m).read().decode() for m in t.getmembers() if m.isfile()}
        assert "conductor.http.tls" in files["doctor.txt"] and "tls.crt is good for" in files["doctor.txt"], files["doctor.txt"]
        assert "vllm:num_requests_running" in files["metrics-conductor-n1.txt"], files["metrics-conductor-n1.txt"]
        assert json.loads(files["status.json"])["serving"] is True
        assert not [name for name, text in files.items() if mine.read_text().strip() in text or "PRIVATE KEY" in text]
    finally:
        c.stop()

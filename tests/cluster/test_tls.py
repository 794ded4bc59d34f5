"""Certificates between all daemons, to etcd and for batonctl: a whole cluster from the outside. What is
refused in which words is tests/unit/test_tls.c."""
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import time

import pytest

from conftest import BUILD, CTL, ROOT, Cluster, scrape, wait_for

CERTS = os.path.join(ROOT, "deploy", "local", "baton-certs")
PROMPTS = ["ROMEO: what light through yonder window breaks? It is the east, and", "To be, or not to be"]
ENDS = 'baton_tls_certificate_not_after_seconds{use="cluster.tls"}'
REFUSED = 'baton_tls_peers_refused_total{use="cluster.tls"}'


@pytest.fixture(scope="module")
def secure():
    c = Cluster("--tls", "--set", "conductor.conductor.http.tls=")
    yield c
    c.stop()


def tls_dir(c):
    return os.path.join(c.state_dir, "tls")


def certs(c, *args, folder=None):
    name = c.daemon("kvstore")["log"]  # any daemon's configuration has the cluster's name
    conf = os.path.join(c.state_dir, "conf", os.path.basename(name).replace(".log", ".yaml"))
    cluster = open(conf).readline().split("name: ")[1].split(",")[0]
    subprocess.run([CERTS, "--dir", folder or tls_dir(c), "--cluster", cluster, *args], check=True)


def ctl(c, *args):
    addr = open(os.path.join(c.state_dir, "conductor.addr")).read().strip()
    p = subprocess.run([CTL, "--addr", addr, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    return p.returncode, p.stdout.decode()


def log(daemon):
    with open(daemon["log"], errors="replace") as f:
        return f.read()


def test_the_first_steps_of_the_manual(tmp_path):
    """What docs/OPERATING.md says to type makes files that a daemon takes, the list of revoked ones included."""
    def make(*args):
        p = subprocess.run([CERTS, "--dir", str(tmp_path), "--cluster", "prod", *args], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, timeout=60)
        return p.returncode, p.stdout

    assert make("ca")[0] == 0 and make("node", "n1", "kvstore", "prefill")[0] == 0 and make("admin")[0] == 0
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    sets = {"cluster.name": "prod", "node.id": "n1", "run_dir": run_dir, "model.path": os.path.join(ROOT, "deploy/models/shakespeare-draft-1m"),
            "cluster.tls.ca": tmp_path / "ca.crt", "cluster.tls.cert": tmp_path / "n1-kvstore.crt",
            "cluster.tls.key": tmp_path / "n1-kvstore.key", "cluster.tls.revoked": tmp_path / "revoked.txt"}
    check = [os.path.join(BUILD, "bin", "baton-kvstore"), "--check"]
    for k, v in sets.items():
        check += ["--set", f"{k}={v}"]
    subprocess.run(check, check=True, timeout=60)
    assert make("revoke", "n1-prefill.crt")[0] == 0
    subprocess.run(check, check=True, timeout=60)
    lines = (tmp_path / "revoked.txt").read_text().splitlines()
    assert lines[0].startswith("#") and lines[1].startswith("sha256:") and len(lines) == 2
    assert make("ca")[0] == 1  # the CA is not made anew
    # They count on a host whose clock is behind, and the CA is one for clients that check strictly.
    for at, good in ((time.time() - 23 * 3600, True), (time.time() + 3600, True), (time.time() - 25 * 3600, False)):
        for crt in ("ca.crt", "n1-kvstore.crt", "admin.crt"):
            p = subprocess.run(["openssl", "verify", "-x509_strict", "-attime", str(int(at)), "-CAfile", tmp_path / "ca.crt",
                                tmp_path / crt], capture_output=True, timeout=60)
            assert (p.returncode == 0) == good, p.stderr
    assert not [f for f in os.listdir(tmp_path) if f.startswith(".")]
    rc, text = make("revoke", "/nowhere/x.crt")
    assert rc == 1 and "there is no /nowhere/x.crt:" in text
    rc, text = make("revoke", "x.crt")
    assert rc == 1 and f"there is no {tmp_path}/x.crt:" in text
    assert "from 1 up" in make("--days", "0", "admin")[1]


def test_the_tokens_are_the_same(cluster, secure):
    for prompt in PROMPTS:
        plain, tls = (c.complete(prompt, 48, logprobs=5)["choices"][0] for c in (cluster, secure))
        assert plain["text"] == tls["text"] and plain["logprobs"] == tls["logprobs"]
    assert secure.metrics("conductor")[REFUSED] == 0
    assert secure.metrics("kvstore")["baton_kv_sent_bytes_total"] > 0  # the KV went from one node to the other


def test_kv_goes_through_tls_as_well(cluster, make_cluster):
    c = make_cluster("--tls", "--set", "kvstore.wire.transport=grpc")
    for prompt in PROMPTS:
        plain, tls = (x.complete(prompt, 48, logprobs=5)["choices"][0] for x in (cluster, c))
        assert plain["text"] == tls["text"] and plain["logprobs"] == tls["logprobs"]
    assert c.metrics("kvstore")["baton_kv_sent_bytes_total"] > 0
    assert "transport=grpc-tls" in log(c.daemon("kvstore"))


def test_batonctl_shows_its_certificate(secure):
    rc, out = ctl(secure, "--tls", tls_dir(secure), "status")
    assert rc == 0 and "serving    yes" in out, out
    rc, out = ctl(secure, "status")
    assert rc == 1 and "whether it needs a certificate (--tls)" in out, out
    rc, out = ctl(secure, "--tls", os.path.join(secure.state_dir, "nowhere"), "status")
    assert rc == 1 and "ca.crt: it cannot be read: No such file" in out, out


def test_a_stranger_of_another_ca_does_not_get_in(secure, tmp_path):
    """A kvstore that may speak to etcd and whose certificate some other CA made for this very node."""
    other = str(tmp_path / "other")
    certs(secure, "ca", folder=other)
    certs(secure, "node", "n3", folder=other)
    before = secure.metrics("conductor")[REFUSED]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    sets = {"node.id": "n3", "run_dir": run_dir, "kvstore.slab_bytes": "1MiB",
            "cluster.tls.ca": f"{other}/ca.crt", "cluster.tls.cert": f"{other}/n3-kvstore.crt",
            "cluster.tls.key": f"{other}/n3-kvstore.key", "etcd.tls.ca": f"{tls_dir(secure)}/ca.crt",
            "etcd.tls.cert": f"{tls_dir(secure)}/n1-kvstore.crt", "etcd.tls.key": f"{tls_dir(secure)}/n1-kvstore.key"}
    with open(tmp_path / "log", "wb") as out:
        p = subprocess.Popen([os.path.join(BUILD, "bin", "baton-kvstore"), "--config",
                              os.path.join(secure.state_dir, "conf", "kvstore-n1.yaml"),
                              *(a for k, v in sets.items() for a in ("--set", f"{k}={v}"))],
                             stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        wait_for(lambda: secure.metrics("conductor")[REFUSED] > before, 60, "the conductor refuses it")
        assert "another CA signed the certificate" in log(secure.daemon("conductor"))
        assert secure.complete(PROMPTS[0], 8, ignore_eos=True)["usage"]["completion_tokens"] == 8
        rc, out = ctl(secure, "--tls", tls_dir(secure), "nodes")
        assert rc == 0 and "kvstore-n3" in out  # etcd knows it, and nobody talks to it
    finally:
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 0
    # The other way round: certificates that the others believe are refused by one who has another CA.
    assert "ev=tls_refused" in (tmp_path / "log").read_text()


def test_certificates_are_replaced_while_it_runs(secure):
    daemons = [d for d in secure.status() if d["daemon"] != "etcd"]
    before = {d["http"]: scrape(d["http"])[ENDS] for d in daemons}
    for name in ("n1", "n2"):
        certs(secure, "--days", "9000", "node", name)
    for d in daemons:
        wait_for(lambda d=d: scrape(d["http"])[ENDS] > before[d["http"]], 60, f"{d['log']} has read its new one")
    conductor = daemons[-1]
    assert conductor["daemon"] == "conductor"
    # A connection that is new: the conductor's to a kvstore that stood still until it was given up.
    kvstore = secure.daemon("kvstore", 1)
    up = 'baton_sessions_up{kind="kvstore"}'
    os.kill(kvstore["pid"], signal.SIGSTOP)
    try:
        wait_for(lambda: secure.metrics("conductor")[up] == 1, 60, "the session ends")
    finally:
        os.kill(kvstore["pid"], signal.SIGCONT)
    wait_for(lambda: secure.metrics("conductor")[up] == 2, 60, "it is back")
    assert secure.complete(PROMPTS[1], 8, ignore_eos=True)["usage"]["completion_tokens"] == 8
    assert "tls_not_renewed" not in "".join(log(d) for d in daemons)


def sign_for(folder, name, seconds):
    """A certificate like NAME.crt, of the same key, that ends in so many seconds. Returns when it ends."""
    def openssl(*args):
        return subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout

    sans = openssl("x509", "-in", f"{name}.crt", "-noout", "-ext", "subjectAltName").splitlines()[1].strip()
    ends = int(time.time()) + seconds
    with tempfile.TemporaryDirectory() as work:
        open(os.path.join(work, "index"), "w").close()
        with open(os.path.join(work, "ext"), "w") as f:
            f.write(f"basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={sans}\n")
        with open(os.path.join(work, "conf"), "w") as f:
            f.write(f"[ca]\ndefault_ca=one\n[one]\ndatabase={work}/index\nnew_certs_dir={work}\npolicy=any\nrand_serial=yes\n"
                    "[any]\ncommonName=supplied\n")
        openssl("req", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}", "-out", f"{work}/csr")
        openssl("ca", "-batch", "-notext", "-config", f"{work}/conf", "-md", "sha256", "-keyfile", "ca.key", "-cert", "ca.crt",
                "-in", f"{work}/csr", "-extfile", f"{work}/ext", "-out", f"{name}.crt.new",
                "-enddate", time.strftime("%Y%m%d%H%M%SZ", time.gmtime(ends)))
    os.rename(os.path.join(folder, f"{name}.crt.new"), os.path.join(folder, f"{name}.crt"))
    return ends


def shown(c, daemon):
    """When the certificate ends that a daemon shows to who calls now."""
    ctx = ssl.create_default_context(cafile=os.path.join(tls_dir(c), "ca.crt"))
    ctx.check_hostname = False
    ctx.load_cert_chain(os.path.join(tls_dir(c), "admin.crt"), os.path.join(tls_dir(c), "admin.key"))
    ctx.set_alpn_protocols(["h2"])
    host, port = re.findall(r"ev=ready rpc=(\S+):(\d+)", log(daemon))[-1]
    with socket.create_connection((host, int(port)), 60) as s, ctx.wrap_socket(s) as t:
        return ssl.cert_time_to_seconds(t.getpeercert()["notAfter"])


def test_a_certificate_expires_under_a_session(secure):
    """A kvstore's ends while the conductor talks to it: the session ends within 5 s, both logs name the certificate and
    the remedy, and with a new one in its place the kvstore is back."""
    kvstore, up = secure.daemon("kvstore", 1), 'baton_sessions_up{kind="kvstore"}'
    assert secure.metrics("conductor")[up] == 2
    for seconds in (25, 50, 100, 200):  # until there is a session with it, which takes a busy machine longer
        ends = sign_for(tls_dir(secure), "n2-kvstore", seconds)
        wait_for(lambda: scrape(kvstore["http"])[ENDS] == ends, 60, "the kvstore has read its new certificate")  # noqa: B023
        try:
            wait_for(lambda: shown(secure, kvstore) == ends, 60, "gRPC as well, which looks every 5 s for itself")  # noqa: B023
        except ssl.SSLError:  # it is over
            continue
        os.kill(kvstore["pid"], signal.SIGSTOP)
        try:
            wait_for(lambda: secure.metrics("conductor")[up] == 1, 60, "the session ends")
        finally:
            os.kill(kvstore["pid"], signal.SIGCONT)
        wait_for(lambda: secure.metrics("conductor")[up] == 2 or time.time() >= ends, 60, "a session with it is up")  # noqa: B023
        if time.time() < ends:
            break
    else:
        raise AssertionError("this machine is too slow for this test")
    wait_for(lambda: secure.metrics("conductor")[up] == 1, seconds + 60, "the session ends with the certificate")
    assert time.time() >= ends
    assert re.search(r"ev=tls_refused peer=baton://\S+/kvstore/n2 why=\".* has expired\" remedy=\".*give it a new certificate",
                     log(secure.daemon("conductor")))
    wait_for(lambda: re.search(r"ev=tls_expired file=\S+/n2-kvstore.crt .*remedy=\"put a new certificate", log(kvstore)), 60,
             "the kvstore says that its certificate is over")
    certs(secure, "node", "n2")
    wait_for(lambda: secure.metrics("conductor")[up] == 2, 60, "it is back")
    assert secure.complete(PROMPTS[1], 8, ignore_eos=True)["usage"]["completion_tokens"] == 8

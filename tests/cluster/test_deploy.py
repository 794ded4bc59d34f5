"""What a service manager sees: units that systemd accepts, daemons that say when they serve and stop, examples
that the daemons accept, and metrics that Prometheus' own tool accepts."""
import glob
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

import sanitizer
from conftest import BUILD, ROOT, Cluster, wait_for


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """make install under a prefix of its own: units name binaries that exist."""
    prefix = str(tmp_path_factory.mktemp("prefix"))
    p = subprocess.run(["make", "-s", "--no-print-directory", "install-files", "install-system", f"B={BUILD}",
                        f"SANITIZE={sanitizer.KIND}", f"PREFIX={prefix}", f"SYSCONFDIR={prefix}/etc"], cwd=ROOT, stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert p.returncode == 0, p.stdout.decode()
    return prefix


def test_units_look_where_the_configuration_is(installed):
    with open(os.path.join(installed, "lib/systemd/system/baton-kvstore.service")) as f:
        assert f"--config {installed}/etc/baton/kvstore.yaml" in f.read()


def test_uninstall_leaves_what_is_mine(tmp_path):
    """Of a package's staging folder: what is written names the final places, and all of it goes again."""
    def make(target):
        p = subprocess.run(["make", "-s", "--no-print-directory", *target, f"B={BUILD}", f"SANITIZE={sanitizer.KIND}",
                            f"DESTDIR={tmp_path}", "PREFIX=/opt/b", "SYSCONFDIR=/opt/etc"], cwd=ROOT,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
        assert p.returncode == 0, p.stdout.decode()
    make(["install-files", "install-system"])
    unit = (tmp_path / "opt/b/lib/systemd/system/baton-conductor.service").read_text()
    assert "ExecStart=/opt/b/bin/baton-conductor --config /opt/etc/baton/conductor.yaml\n" in unit
    assert (tmp_path / "opt/b/share/doc/baton/plots").is_dir()  # docs/measurements links to them
    mine = tmp_path / "opt/etc/baton/kvstore.yaml"
    mine.write_text("node: {id: a}\n")
    make(["uninstall"])
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == [mine]
    mine.unlink()
    make(["uninstall"])
    assert not (tmp_path / "opt/etc/baton").exists()


def test_units_verify_silently(installed):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze here")
    units = os.path.join(installed, "lib", "systemd", "system")
    names = sorted(glob.glob(units + "/*.service") + glob.glob(units + "/*.target"))
    assert len(names) == 5
    env = dict(os.environ, SYSTEMD_UNIT_PATH=units + ":")
    p = subprocess.run([tool, "verify", "--man=no", *names], env=env, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, timeout=60)
    # Other packages' units may be talked about as well; what concerns ours must be nothing.
    said = [li for li in p.stdout.decode().splitlines() if "baton" in li]
    assert not said, "\n".join(said)
    # A unit with a mistake does not pass: the check can fail.
    bad = os.path.join(units, "baton-bad.service")
    with open(bad, "w") as f:
        f.write("[Service]\nType=notify\nExecStart=/nonexistent/baton\nNoNewPrivilege=yes\n")
    p = subprocess.run([tool, "verify", "--man=no", bad], env=env, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, timeout=60)
    os.unlink(bad)
    assert p.returncode != 0 and b"NoNewPrivilege" in p.stdout, p.stdout


def test_the_common_rules_reach_every_service(installed):
    with open(os.path.join(installed, "lib/systemd/system/baton-.service.d/10-common.conf")) as f:
        common = f.read()
    for rule in ("User=baton", "Restart=on-failure", "NoNewPrivileges=yes", "ProtectSystem=strict"):
        assert rule in common
    for path in glob.glob(os.path.join(installed, "lib/systemd/system/*.service")):
        with open(path) as f:
            text = f.read()
        assert "@PREFIX@" not in text and f"ExecStart={installed}/bin/baton-" in text
        # Those would take the slab and the sockets away from workers.
        for rule in ("DynamicUser", "PrivateNetwork", "PrivateIPC", "MemoryDenyWriteExecute"):
            assert not re.search(rf"^{rule}=", text + common, re.M)
        assert ("PrivateUsers=yes" in text) == path.endswith("baton-conductor.service") and "\nPrivateUsers=" not in common


def security(unit, *more):
    p = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", *more, os.path.basename(unit)],
                       cwd=os.path.dirname(unit), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    return p.returncode, p.stdout.decode()


@pytest.mark.parametrize("unit, most", [("baton-conductor", 13), ("baton-kvstore", 13), ("baton-prefill@", 19),
                                        ("baton-decode@", 19)])
def test_exposure(installed, unit, most, tmp_path):
    """systemd's own measure of what a service could do to its host, and a reason for each protection left out."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    units = tmp_path / "system"
    shutil.copytree(os.path.join(installed, "lib/systemd/system"), units)
    path = str(units / (unit + ".service"))
    rc, text = security(path, f"--threshold={most}")
    assert rc == 0 and "Overall exposure level" in text, text[-3000:]
    common = units / "baton-.service.d" / "10-common.conf"
    reasons = "".join(re.findall(r"^#.*$", common.read_text() + open(path).read(), re.M))
    left_out = [row["name"] for row in json.loads(security(path, "--json=short")[1]) if row["set"] is False]
    assert left_out
    for name in left_out:
        for word in re.findall(r"^[A-Za-z]+=|~@?[A-Z_a-z]+|(?<=\()INET", name):
            assert word in reasons, f"10-common.conf gives no reason why {name} is left out"
    # Without one of the rules the limit does not hold: the check can fail.
    common.write_text(common.read_text().replace("SystemCallFilter=", "#"))
    assert security(path, f"--threshold={most}")[0] != 0


def test_completions_know_every_command():
    """The packages' completions come from batonctl's tables; a shell offers what batonctl's help lists."""
    def made(shell):
        return subprocess.run([os.path.join(ROOT, "deploy/debian/completions.py"), shell], cwd=ROOT, check=True,
                              stdout=subprocess.PIPE, timeout=60).stdout.decode()
    listed = subprocess.run([os.path.join(BUILD, "bin", "batonctl"), "--help"], check=True, stdout=subprocess.PIPE,
                            timeout=60).stdout.decode()
    commands = re.findall(r"^  ([a-z]+)", listed.split("Commands:")[1].split("Options of")[0], re.M)
    assert "explain" in commands
    script = made("bash") + """
offer() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _batonctl; echo "${COMPREPLY[@]}"; }
offer batonctl ""; offer batonctl --addr host:1 role --f; offer batonctl --output ""; offer batonctl key re
"""
    p = subprocess.run(["bash", "-euc", script], check=True, stdout=subprocess.PIPE, timeout=60)
    first, role, output, key = p.stdout.decode().splitlines()
    assert set(commands) <= set(first.split())
    assert (role, output, key) == ("--force", "json table", "revoke")
    for shell in ("zsh", "fish"):
        text = made(shell)
        assert all(re.search(rf"\b{c}\b", text) for c in commands)


@pytest.mark.parametrize("program", ["baton-kvstore", "batonctl", "baton-local", "baton-sim", "baton-bench"])
def test_manual_page(program):
    """Made of --help; a wrong one would be noticed by man, where it is installed."""
    script = os.path.join(ROOT, "deploy", "local", program)
    path = script if os.path.exists(script) else os.path.join(BUILD, "bin", program)
    p = subprocess.run([os.path.join(ROOT, "deploy/debian/man.py"), program, "8", path], check=True,
                       stdout=subprocess.PIPE, timeout=60)
    text = p.stdout.decode()
    for part in (rf"^\.TH {program.upper()} 8 ", rf"^\.SH NAME\n{program} \\- [a-z]", r"^\.SH SYNOPSIS\n\.nf\n\S"):
        assert re.search(part, text, re.M), (part, text[:2000])
    options = subprocess.run([path, "--help"], check=True, stdout=subprocess.PIPE, timeout=60).stdout.decode()
    assert set(re.findall(r"--[a-z-]+", options)) == set(re.findall(r"--[a-z-]+", text.replace("\\-", "-"))) or program == "batonctl"
    if shutil.which("man"):
        p = subprocess.run(["man", "--warnings", "-l", "-"], input=p.stdout, stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, env=dict(os.environ, MANWIDTH="100"), timeout=60)
        assert not p.stderr, p.stderr


def test_every_service_has_a_memory_limit(installed):
    for path in glob.glob(os.path.join(installed, "lib/systemd/system/*.service")):
        with open(path) as f:
            limits = re.findall(r"^MemoryMax=(\S+)$", f.read(), re.M)
        assert len(limits) == 1, path
        if path.endswith("baton-conductor.service"):  # above what its own limits hold, at their defaults
            p = subprocess.run([os.path.join(BUILD, "bin", "baton-conductor"), "--print-example"],
                               stdout=subprocess.PIPE, timeout=60)
            body = re.search(r"body_max: *(\d+)MiB", p.stdout.decode())
            bodies = max(256, 4 * int(body[1]))  # bt_conductor_body_total
            assert int(limits[0].removesuffix("G")) * 1024 >= 16 * bodies
        else:  # a slab may have any size
            assert limits[0].endswith("%")


@pytest.mark.parametrize("daemon", ["conductor", "kvstore", "prefill", "decode"])
def test_example_configuration(installed, daemon, tmp_path):
    with open(os.path.join(installed, "etc", "baton", daemon + ".yaml.example")) as f:
        text = f.read()
    for name in ("salt", "api-keys"):
        (tmp_path / name).write_text("secret\n")
        (tmp_path / name).chmod(0o640)
    for args in (("ca",), ("http", "localhost")) if daemon == "conductor" else ():
        subprocess.run([os.path.join(ROOT, "deploy", "local", "baton-certs"), "--dir", str(tmp_path), *args], check=True)
    if daemon == "conductor":
        (tmp_path / "http").rename(tmp_path / "https")
    model = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
    text = text.replace("/srv/models/llama-3.1-8b-instruct", model).replace(f"{installed}/etc/baton/", f"{tmp_path}/")
    conf = tmp_path / "c.yaml"
    conf.write_text(text)
    p = subprocess.run([os.path.join(BUILD, "bin", "baton-" + daemon), "--config", str(conf), "--check=values"],
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    assert p.returncode == 0, p.stdout.decode()


class Manager:
    """A NOTIFY_SOCKET that remembers what arrived and from which process."""

    def __init__(self, path):
        self.path = path
        self.s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.s.bind(path)
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.got = {}
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while True:
            try:
                data, anc, _, _ = self.s.recvmsg(4096, 256)
            except OSError:
                return
            pid = int.from_bytes(anc[0][2][:4], "little")
            self.got.setdefault(pid, []).append(data.decode())

    def all_of(self, pid):
        """What a process has sent until now: datagrams arrive in their order, and this one is the last."""
        mine = len(self.got.get(os.getpid(), []))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"here", self.path)
        wait_for(lambda: len(self.got.get(os.getpid(), [])) > mine, 60, "the manager has read all")
        return list(self.got.get(pid, []))


def test_daemons_say_when_they_serve_and_stop(tmp_path):
    m = Manager(str(tmp_path / "n"))
    with pytest.MonkeyPatch.context() as env:
        env.setenv("NOTIFY_SOCKET", m.path)
        env.setenv("WATCHDOG_USEC", "200000")
        c = Cluster()
    try:
        daemons = {d["daemon"]: d["pid"] for d in c.status() if d["daemon"] != "etcd"}
        assert len(daemons) == 4
        pids = [d["pid"] for d in c.status() if d["daemon"] != "etcd"]
        c.complete("ROMEO:\n", 4)
        for pid in pids:
            wait_for(lambda p=pid: "READY=1" in m.got.get(p, []), 60, f"READY of {pid}")
            assert m.got[pid].count("READY=1") == 1
            fed = m.got[pid].count("WATCHDOG=1")
            wait_for(lambda p=pid, n=fed: m.got[p].count("WATCHDOG=1") > n, 60, f"watchdog of {pid}")
            status = [s for s in m.got[pid] if s.startswith("STATUS=")]
            assert "serving" in status[-1], status
        # A daemon that hangs feeds no watchdog.
        pid = daemons["kvstore"]
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: stopped(pid), 60, "it stands still")
        fed = m.all_of(pid).count("WATCHDOG=1")
        time.sleep(0.5)
        assert m.all_of(pid).count("WATCHDOG=1") == fed
        os.kill(pid, signal.SIGCONT)
    finally:
        c.stop()
    for pid in pids:
        said = m.all_of(pid)
        assert "STOPPING=1" in said, said
        assert said.index("READY=1") < said.index("STOPPING=1")
    m.s.close()


def stopped(pid):
    """All threads of the process."""
    for tid in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{tid}/stat") as f:
            if f.read().rsplit(")", 1)[1].split()[0] != "T":
                return False
    return True


@pytest.mark.parametrize("daemon", ["conductor", "kvstore", "prefill", "decode"])
def test_sighup_reloads(cluster, daemon):
    """Each daemon reads its own file: what a test has left in it concerns no other one."""
    d = cluster.daemon(daemon)
    conf = os.path.join(cluster.state_dir, "conf", os.path.basename(d["log"])[:-len(".log")] + ".yaml")

    def log():
        with open(d["log"], errors="replace") as f:
            return f.read()

    with open(conf, "a") as f:
        f.write("log: {level: debug}\n")
    os.kill(d["pid"], signal.SIGHUP)
    wait_for(lambda: "ev=reloaded log_level=debug" in log(), 60, "reload")
    assert "has changed" not in log()  # nothing else has
    # A file with a mistake changes nothing, and the daemon lives.
    with open(conf, "a") as f:
        f.write("nonsense: 1\n")
    os.kill(d["pid"], signal.SIGHUP)
    wait_for(lambda: "ev=reload_failed" in log(), 60, "the mistake is told of")
    assert "unknown key nonsense" in log()
    assert log().count("ev=reloaded") == 1
    assert cluster.complete("ROMEO:\n", 4)["usage"]["completion_tokens"] == 4


def test_promtool_accepts_the_metrics(cluster):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool here (Debian's package prometheus)")
    cluster.complete("ROMEO:\n", 4)
    for d in cluster.status():
        if d["daemon"] == "etcd":
            continue
        host, port = d["http"].rsplit(":", 1)
        c = http.client.HTTPConnection(host, int(port), timeout=60)
        c.request("GET", "/metrics")
        text = c.getresponse().read()
        c.close()
        p = subprocess.run([tool, "check", "metrics"], input=text, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, timeout=60)
        # vLLM's names, kept for its dashboards, break rules of style (a colon); nothing else may.
        said = [li for li in p.stdout.decode().splitlines() if not re.match(r"vllm:\S+ ", li)]
        assert not said, (d["daemon"], said)


def test_prometheus_scrapes_what_compose_listens_on():
    with open(os.path.join(ROOT, "deploy", "compose", "docker-compose.yml")) as f:
        listens = set(re.findall(r"_HTTP_LISTEN: (\S+)", f.read()))
    config = os.path.join(ROOT, "deploy", "prometheus", "prometheus.yml")
    with open(config) as f:
        targets = set(re.findall(r"'(\d[\d.]+:\d+)'", f.read()))
    assert len(targets) == 5 and targets == listens

"""deploy/compose without Docker: each service's command and environment, with the addresses of the compose network, in a
network namespace. What Docker itself does (images, volumes, restarts) is not tried here."""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
import yaml

import netns
from conftest import BUILD, PATIENCE, ROOT, wait_for

COMPOSE = os.path.join(ROOT, "deploy", "compose")
BIN = os.path.join(BUILD, "bin")
WAIT_S = 120 * PATIENCE
GET = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=60).read().decode())"


def services():
    with open(os.path.join(COMPOSE, "docker-compose.yml")) as f:
        return yaml.safe_load(f)


class Compose:
    """Services in the order of what they depend on, each awaited by its own health check."""

    def __init__(self, folder):
        self.folder, self.running, self.said = folder, {}, ""
        self.conf = services()
        assert self.conf["name"] == "baton"
        self.machine = netns.Machine(0)
        try:
            for i, s in enumerate(self.conf["services"].values()):  # an interface each: UCX binds to the first address of one
                if "networks" in s:
                    self.machine.run("ip", "link", "add", f"v{i}", "type", "veth", "peer", "name", f"w{i}")
                    self.machine.run("ip", "addr", "add", s["networks"]["baton"]["ipv4_address"] + "/24", "dev", f"v{i}")
                    for card in f"v{i}", f"w{i}":
                        self.machine.run("ip", "link", "set", card, "up")
            for name in ("ca", "secrets", "monitoring", "etcd", "run1", "run2", "bin"):
                os.makedirs(os.path.join(folder, name), mode=0o700)
            shutil.copy(os.path.join(COMPOSE, "setup"), os.path.join(folder, "bin", "compose-setup"))
            shutil.copy(os.path.join(COMPOSE, "healthy"), os.path.join(folder, "bin", "healthy"))
            for name in self.conf["services"]:
                self.start(name)
        except BaseException:
            self.end()
            raise

    def here(self, text, service):
        """A volume's path in a container is a folder of the test's."""
        for volume in service.get("volumes", []):
            name, at = volume.split(":")[:2]
            text = re.sub(re.escape(at) + r"(?=$|[/\s])", os.path.join(self.folder, name), text)
        return text.replace("/opt/baton/share/baton/models", os.path.join(ROOT, "deploy", "models"))

    def env(self, service):
        path = [os.path.join(self.folder, "bin"), BIN, os.path.join(ROOT, "deploy", "local"), os.environ["PATH"]]
        own = {k: self.here(v, service) for k, v in service.get("environment", {}).items()}
        if "BATON_NODE_ID" in own and service.get("network_mode"):
            own["BATON_RUN_DIR"] = self.here("/run/baton", service)
        return {"PATH": ":".join(path), "CA": os.path.join(self.folder, "secrets", "ca.crt"), **own}

    def within(self, service, argv, **more):
        return dict(args=self.machine.within + argv, env=self.env(service), stdin=subprocess.DEVNULL, **more)

    def start(self, name):
        s = self.conf["services"][name]
        if s["image"] != "baton" or s["command"] == "sleep infinity":
            return
        for d, what in s.get("depends_on", {}).items():
            assert d in self.running or what["condition"] == "service_started", f"{name} is listed before {d}"
        argv = shlex.split(self.here(s["command"], s))
        if name == "setup":
            self.said = subprocess.run(**self.within(s, argv, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)).stdout
            self.running[name] = None
            return
        with open(os.path.join(self.folder, name + ".log"), "w") as log:
            self.running[name] = p = subprocess.Popen(**self.within(s, argv, stdout=log, stderr=log))
        if name != "conductor":  # the workers' health needs all the others
            wait_for(lambda: p.poll() is not None or self.healthy(name), WAIT_S, f"{name} is healthy")
            assert p.poll() is None, self.log(name)

    def healthy(self, name):
        s = self.conf["services"][name]
        test = s["healthcheck"]["test"]
        assert test[0] == "CMD"
        return subprocess.run(**self.within(s, test[1:], timeout=WAIT_S)).returncode == 0

    def log(self, name):
        with open(os.path.join(self.folder, name + ".log")) as f:
            return f.read()[-3000:]

    def ask(self, key, path="/v1/models", body=None):
        """(status, answer) over HTTPS, with the CA that setup made; by curl, which enters the namespace."""
        argv = ["curl", "-sS", "--max-time", "120", "--cacert", os.path.join(self.folder, "secrets", "ca.crt"), "-w", "\n%{http_code}",
                "-H", f"Authorization: Bearer {key}", "https://172.30.84.10:8000" + path]
        argv += ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body else []
        out = subprocess.run(self.machine.within + argv, stdout=subprocess.PIPE, text=True, check=True, timeout=WAIT_S).stdout
        text, status = out.rsplit("\n", 1)
        return int(status), text

    def end(self):
        for name, p in reversed(list(self.running.items())):
            if p is not None:
                p.send_signal(signal.SIGTERM if name != "etcd" else signal.SIGKILL)
                try:
                    p.wait(20)
                except subprocess.TimeoutExpired:
                    p.kill()
                    p.wait()
        self.machine.end()


@pytest.fixture(scope="module")
def c(tmp_path_factory):
    netns.need()
    compose = Compose(str(tmp_path_factory.mktemp("compose")))
    yield compose
    compose.end()


def test_clients_need_https_and_a_key(c):
    wait_for(lambda: c.healthy("conductor"), WAIT_S, "the conductor is healthy")
    key = c.said.split()[-1]
    status, text = c.ask(key, "/v1/completions", {"prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0})
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 8, text
    assert c.ask(key[:-1] + "x")[0] == 401
    with open(os.path.join(c.folder, "secrets", "api-keys")) as f:
        assert key not in f.read()
    with open(os.path.join(c.folder, "monitoring", "key")) as f:
        scrape = f.read().strip()
    assert c.ask(scrape, "/metrics")[0] == 200 and c.ask(scrape)[0] == 403
    assert not [f for f in os.listdir(os.path.join(c.folder, "secrets")) if f == "ca.key"]


def test_batonctl_in_the_conductors_container(c):
    p = subprocess.run(**c.within(c.conf["services"]["conductor"], ["batonctl", "nodes", "-o", "json"], stdout=subprocess.PIPE, timeout=120))
    nodes = json.loads(p.stdout)
    assert {(n["kind"], n["node"]) for n in nodes} == {("conductor", "front"), ("kvstore", "node1"), ("prefill", "node1"),
                                                       ("kvstore", "node2"), ("decode", "node2")}
    assert all(n["session_up"] for n in nodes if n["kind"] != "conductor")


def test_prometheus_reaches_all(c):
    prometheus = shutil.which("prometheus") or os.path.join(ROOT, "build/third/prometheus/usr/bin/prometheus")
    if not os.access(prometheus, os.X_OK):
        pytest.skip("no prometheus here (Debian's package prometheus)")
    s = c.conf["services"]["prometheus"]
    conf = os.path.join(c.folder, "prometheus.yml")
    with open(os.path.join(ROOT, "deploy", "prometheus", "prometheus.yml")) as f, open(conf, "w") as to:
        to.write(c.here(f.read().replace("/monitoring/", c.folder + "/monitoring/"), {}).replace("5s", "1s"))
    for name in ("rules.yml", "alerts.yml"):
        shutil.copy(os.path.join(ROOT, "deploy", "prometheus", name), c.folder)
    assert s["networks"]["baton"]["ipv4_address"] in open(os.path.join(ROOT, "deploy/grafana/provisioning/datasources/prometheus.yml")).read()
    argv = [prometheus, f"--config.file={conf}", f"--storage.tsdb.path={c.folder}/tsdb", "--web.listen-address=172.30.84.3:9090",
            "--log.level=warn"]
    p = subprocess.Popen(**c.within(s, argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def up():
        out = subprocess.run(c.machine.within + ["/usr/bin/python3", "-c", GET, "http://172.30.84.3:9090/api/v1/query?query=up"],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120).stdout
        got = {r["metric"]["instance"]: r["value"][1] for r in json.loads(out)["data"]["result"]} if out else {}
        return len(got) == 5 and set(got.values()) == {"1"}

    try:
        wait_for(up, WAIT_S, "every daemon is scraped", every_s=0.5)
    finally:
        p.kill()
        p.wait()


def test_secrets_are_made_once(c):
    s = c.conf["services"]["setup"]
    with open(os.path.join(c.folder, "secrets", "salt")) as f:
        before = f.read()
    again = subprocess.run(**c.within(s, shlex.split(c.here(s["command"], s)), stdout=subprocess.PIPE, text=True, check=True, timeout=120))
    with open(os.path.join(c.folder, "secrets", "salt")) as f:
        assert f.read() == before and "key add" in again.stdout

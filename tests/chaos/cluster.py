"""The cluster of a chaos run: deploy/local/baton-local starts it, here its daemons are killed, stopped, started again and
looked at. Each daemon keeps its command line, so that it starts as a service manager would start it."""
import glob
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "cluster"))
import sanitizer  # noqa: E402
import slow_disk  # noqa: E402
from local_cluster import BUILD, LOCAL, ROOT, scrape  # noqa: E402
from restarts import args_of  # noqa: E402
from sanitizer import PATIENCE  # noqa: E402
from wall_clock import WallClock  # noqa: E402

sys.path.insert(0, HERE)
import net  # noqa: E402

NODES = ["n1", "n2", "n3"]
PORT_A, PORT_B = 8000, 8001
KEYS = {"alpha": "sk-chaos-alpha", "beta": "sk-chaos-beta", "gamma": "sk-chaos-gamma"}
DISK_MIB = 160  # of each node's SSD, where it can be a file system of its own
POLICY = {"n1": "always", "n2": "second_use", "n3": "evict"}
SHIMMED_DISK, SHIMMED_CLOCK = "n3", "n1"  # nodes whose kvstore has a disk that can fail, a clock that can be set

WRAPPER = """#!/bin/bash
# A daemon of the chaos run: in its node's network, with what its node has of its own.
conf=$2
shift 2
node=$(sed -n 's/^node: {{id: \\(.*\\)}}$/\\1/p' "$conf")
etcd=$(sed -n "s/^etcd: {{endpoints: \\['\\(.*\\)'\\]}}$/\\1/p" "$conf")
. "{folder}/node-$node"
exec "${{enter[@]}}" {env} "{real}" --config "$conf" "$@" "${{mine[@]}}"
"""
ETCD_WRAPPER = """#!/bin/bash
# etcd for several network namespaces: it listens where they reach it, and its certificate says so.
args=() next=
for a in "$@"; do
    case $next in
    --listen-client-urls | --advertise-client-urls) a=${{a//127.0.0.1/{address}}} ;;
    --cert-file) "{certs}" --dir "$(dirname "$a")" etcd 127.0.0.1,{address} || exit 1 ;;
    esac
    args+=("$a")
    next=$a
done
exec "{real}" "${{args[@]}}"
"""


def starttime(pid):
    """Tells a process from a later one with the same pid; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            rest = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if rest[0] == "Z" else rest[19]


def family(pid):
    """The process and its children, theirs included."""
    out = [pid]
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(path) as f:
                children = f.read().split()
        except OSError:
            continue
        for child in children:
            out += family(int(child))
    return out


def wait_for(check, seconds, what):
    end = time.monotonic() + seconds * PATIENCE
    while True:
        v = check()
        if v:
            return v
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}; last: {v!r}")
        time.sleep(0.05)


class Daemon:
    """One that runs, or is to run again. `planned`: its end is part of a fault."""

    def __init__(self, cluster, kind, node, name, pid, log, command=None):
        self.cluster, self.kind, self.node, self.name, self.log = cluster, kind, node, name, log
        self.pid, self.start, self.child = pid, starttime(pid), None
        self.planned = False
        self.log_from = 0
        self.deaths = []  # when each of its processes ended or was cut off, by the monotonic clock
        self.argv, self.env, _ = args_of(pid)
        if command:
            self.argv = command

    def family(self):
        """Its processes: a kvstore may have a child."""
        return family(self.pid)

    def alive(self):
        return self.start is not None and starttime(self.pid) == self.start

    def signal(self, number):
        if self.alive():
            os.kill(self.pid, number)

    def signal_all(self, number):
        """Its child processes too: one that only stops does not take them with it."""
        for pid in self.family() if self.alive() else []:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def lost(self):
        self.deaths.append(time.monotonic())

    def kill(self):
        """The process; its child processes must end by themselves."""
        self.planned = True
        self.lost()
        children = [(pid, starttime(pid)) for pid in self.family()[1:]] if self.alive() else []
        self.signal(signal.SIGKILL)
        wait_for(lambda: not self.alive(), 10, f"{self.name} ends")
        self.reap()
        wait_for(lambda: all(start is None or starttime(pid) != start for pid, start in children), 10,
                 f"the child processes of {self.name} end with it")

    def reap(self):
        if self.child is not None:
            self.child.wait(30)

    def spawn(self):
        """Starts it. Whether it comes up is asked by others."""
        within = self.cluster.net.machines[self.node].within if self.cluster.net and self.kind != "etcd" else []
        self.log_from = os.path.getsize(self.log)
        with open(self.log, "ab") as f:
            self.child = subprocess.Popen([*within, *self.argv], env=self.env, cwd="/", stdin=subprocess.DEVNULL, stdout=f, stderr=f)
        self.pid, self.start = self.child.pid, starttime(self.child.pid)

    def text(self, since=None):
        with open(self.log, "rb") as f:
            f.seek(self.log_from if since is None else since)
            return f.read().decode(errors="replace")

    def ready(self, key="http"):
        m = re.findall(r"ev=ready\b.*?\b" + key + r"=(\S+)", self.text())
        return m[-1] if m else None

    def address(self, key="http"):
        """(host, port); waits for a daemon that another fault of the round starts again."""
        host, port = wait_for(lambda: self.ready(key), 40, f"{self.name} is ready").rsplit(":", 1)
        return host, int(port)

    def start_again(self, seconds=30):
        """Until it is ready; again if it ends because its predecessor's name is still taken."""
        self.spawn()

        def up():
            if not self.alive():
                self.reap()
                self.spawn()
            return self.kind == "etcd" or self.ready()

        wait_for(up, seconds, f"{self.name} is ready again")
        self.planned = False

    def metrics(self):
        return scrape(self.ready())


class Conductor:
    """Where clients reach one, and when it was away."""

    def __init__(self, daemon, host, port):
        self.daemon, self.host, self.port = daemon, host, port
        # [from, to or None, breaks], by the monotonic clock: who met that may be refused, and broken off if `breaks`.
        self.away = []

    def is_away(self):
        """Or was, a moment ago."""
        return any(b is None or time.monotonic() - b < 10 * PATIENCE for _, b, _ in self.away)


class Cluster:
    def __init__(self, seed, switched, device="cpu"):
        self.folder = tempfile.mkdtemp(prefix="baton-chaos-")
        self.state, self.disks, self.net, self.daemons = os.path.join(self.folder, "s"), {}, None, []
        self.mounted = []
        self.closing = False
        self.wire_deaths = 0
        try:
            self.make_disks()
            if switched:
                self.net = net.Net(NODES, seed, os.path.join(BUILD, "tests", "tools", "net_switch"))
            self.make_wrappers()
            self.up(device)
            self.second_conductor()
        except BaseException:
            self.stop(check=False)
            raise

    # ---- start ----
    def make_disks(self):
        os.makedirs(self.folder + "/bin")
        for n in NODES:
            folder = os.path.join(self.folder, "disk-" + n)
            os.makedirs(folder)
            p = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=0700", "tmpfs", folder],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if p.returncode == 0:
                self.mounted.append(folder)
            self.disks[n] = folder
        self.disk_lib = slow_disk.build(self.folder)
        self.disk_fails = os.path.join(self.folder, "disk-fails")
        self.clock = WallClock(self.folder)

    def shim(self, kind, node):
        """Environment of a daemon, as words of env."""
        env = {}
        if kind == "kvstore" and node == SHIMMED_DISK:
            env = slow_disk.environment({}, self.disk_lib, 2e9, self.disk_fails)
        elif kind == "kvstore" and node == SHIMMED_CLOCK or kind == "conductor":
            env = self.clock.environment({})
        return " ".join(["env"] + [shlex.quote(f"{k}={v}") for k, v in env.items()]) if env else ""

    def make_wrappers(self):
        self.bin = os.path.join(self.folder, "bin")
        for kind in "conductor", "kvstore", "prefill", "decode":
            real = os.path.join(BUILD, "bin", "baton-" + kind)
            with open(os.path.join(self.bin, "baton-" + kind), "w") as f:
                f.write(WRAPPER.format(folder=self.folder, real=real, env=f"${{env_{kind}}}"))
        for n in NODES:
            enter, mine = [], {"log.level": "info"}
            if self.net:
                host = self.net.address[n]
                enter = self.net.machines[n].within
                mine |= {"rpc.listen": f"{host}:0"}
            with open(os.path.join(self.folder, "node-" + n), "w") as f:
                sets = " ".join(f"--set {k}={v}" for k, v in mine.items())
                f.write(f"enter=({' '.join(enter)})\nmine=({sets})\n")
                if self.net:
                    f.write(f"mine+=(--set \"etcd.endpoints=${{etcd//127.0.0.1/{self.net.address[net.MAIN]}}}\")\n"
                            f"case $0 in\n"
                            f"*conductor) mine+=(--set conductor.http.listen={host}:{PORT_A}) ;;\n"
                            f"*kvstore) mine+=(--set http.listen={host}:0 --set kvstore.wire.listen={host}) ;;\n"
                            f"*) mine+=(--set http.listen={host}:0) ;;\nesac\n")
                for kind in "conductor", "kvstore", "prefill", "decode":
                    f.write(f"env_{kind}=\"{self.shim(kind, n)}\"\n")
                f.write(f"case $0 in *kvstore) mine+=(--set kvstore.ssd.write_policy={POLICY[n]}) ;; esac\n")
        self.etcd_bin = os.environ.get("BATON_ETCD") or os.path.join(ROOT, "build/third/etcd/usr/bin/etcd")
        if not os.access(self.etcd_bin, os.X_OK):
            self.etcd_bin = shutil.which("etcd")
        with open(os.path.join(self.bin, "etcd"), "w") as f:
            f.write(ETCD_WRAPPER.format(address=self.net.address[net.MAIN] if self.net else "127.0.0.1", real=self.etcd_bin,
                                        certs=os.path.join(ROOT, "deploy", "local", "baton-certs")))
        for name in os.listdir(self.bin):
            os.chmod(os.path.join(self.bin, name), 0o755)

    def up(self, device):
        keys = os.path.join(self.folder, "keys")
        with open(os.open(keys, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
            f.write("".join(f"{key} tenant={tenant} scopes=inference,metrics,admin\n" for tenant, key in KEYS.items()))
        os.environ["BATON_API_KEY"] = next(iter(KEYS.values()))  # of scrape() and batonctl
        sets = {"conductor.conductor.api_keys_file": keys, "kvstore.kvstore.slab_bytes": "40MiB",
                "kvstore.kvstore.ssd.path": os.path.join(self.folder, "disk-{node}", "ssd"),
                "kvstore.kvstore.ssd.bytes": "64MiB", "kvstore.kvstore.ssd.probe_ms": "100ms",
                "prefill.worker.drain_ms": "5s", "decode.worker.drain_ms": "5s", "conductor.conductor.drain_ms": "20s"}
        for role in "prefill", "decode":
            sets[f"{role}.engine.mem"] = "48MiB"
            if device == "null":
                sets[f"{role}.engine.device"] = "null"
        options = [w for k, v in sets.items() for w in ("--set", f"{k}={v}")]
        p = subprocess.run([LOCAL, "up", "--dir", self.state, "--port", str(free_port()), "--nodes", "3", "--prefill", "2", "--decode", "3",
                            "--tls", "--set", "conductor.conductor.http.tls=", *options], env=dict(os.environ, BATON_BIN=self.bin, BATON_ETCD=os.path.join(self.bin, "etcd")),
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           timeout=240 * PATIENCE)
        if p.returncode != 0:
            raise RuntimeError(f"baton-local up ended with {p.returncode}: {p.stderr}")
        with open(os.path.join(self.state, "procs")) as f:
            for line in f:
                kind, node, pid, _, log = line.split()
                name = os.path.basename(log)[:-len(".log")]
                self.daemons.append(Daemon(self, kind, node, name, int(pid), log))
        host, _, port = p.stdout.strip().splitlines()[-1][len("http://"):].rpartition(":")
        self.a = Conductor(self.named("conductor"), host, int(port))
        with open(os.path.join(self.state, "conf", "conductor.yaml")) as f:
            self.cluster_name = re.search(r"cluster: {name: ([^,}]+)", f.read())[1]

    def second_conductor(self):
        """On another node's network, with its own name, port and run directory."""
        first = self.a.daemon
        run = os.path.join(self.state, "run-second")
        os.makedirs(run)
        host = self.net.address["n2"] if self.net else "127.0.0.1"
        port = PORT_B if self.net else free_port()
        argv = [*first.argv, "--set", "conductor.name=conductor-b", "--set", f"run_dir={run}",
                "--set", f"conductor.http.listen={host}:{port}"]
        if self.net:
            argv += ["--set", f"rpc.listen={host}:0"]
        log = os.path.join(self.state, "logs", "conductor-b.log")
        open(log, "w").close()
        d = Daemon(self, "conductor", "n2", "conductor-b", first.pid, log, argv)
        self.daemons.append(d)
        d.start_again()
        self.b = Conductor(d, host, port)
        wait_for(lambda: self.all_up() == "", 60, "all daemons have met")

    # ---- who is there ----
    def named(self, name):
        return next(d for d in self.daemons if d.name == name)

    def kind(self, *kinds):
        return [d for d in self.daemons if d.kind in kinds]

    def conductors(self):
        return [self.a, self.b]

    def etcd(self):
        return self.named("etcd")

    def all_up(self):
        """Empty if both conductors have sessions with every worker and kvstore, else what is missing."""
        workers, kvstores = len(self.kind("prefill", "decode")), len(self.kind("kvstore"))
        for c in self.conductors():
            try:
                m = scrape(f"{c.host}:{c.port}")
            except (OSError, AssertionError, http.client.HTTPException) as e:
                return f"{c.daemon.name}: {e!r}"
            up = m['baton_sessions_up{kind="worker"}'], m['baton_sessions_up{kind="kvstore"}']
            if up != (workers, kvstores):
                return f"{c.daemon.name} has sessions with {up[0]:.0f} of {workers} workers, {up[1]:.0f} of {kvstores} kvstores"
        for d in self.daemons:
            if not d.alive():
                return f"{d.name} does not run"
        return ""

    def ctl(self, *args, conductor=None, timeout=20):
        d = (conductor or self.a).daemon
        return subprocess.run([os.path.join(BUILD, "bin", "batonctl"), "--addr", d.ready("rpc"), "--tls",
                               os.path.join(self.state, "tls"), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=timeout * PATIENCE)

    def ctl_json(self, *args, conductor=None):
        """Of a conductor that another fault has taken away or has left without descriptors, once it is back."""
        c = conductor or self.a
        while True:
            why = "it has no address yet"  # as long as it starts again
            if c.daemon.ready("rpc") is not None:
                p = self.ctl(*args, "-o", "json", conductor=c)
                if p.returncode == 0:
                    return json.loads(p.stdout)
                why = p.stderr.strip()
            if not c.is_away():
                raise OSError(f"batonctl {args}: {why}")
            time.sleep(0.2)

    def etcd_call(self, path, body):
        """etcd's JSON gateway, with a certificate of the cluster."""
        with open(os.path.join(self.state, "etcd.addr")) as f:
            addr = f.read().strip()
        if self.net:
            addr = addr.replace("127.0.0.1", self.net.address[net.MAIN])
        tls = os.path.join(self.state, "tls")
        c = ssl.create_default_context(cafile=tls + "/ca.crt")
        c.check_hostname = False
        c.load_cert_chain(tls + "/admin.crt", tls + "/admin.key")
        with urllib.request.urlopen(f"https://{addr}/v3/{path}", json.dumps(body).encode(), timeout=5, context=c) as r:
            return json.loads(r.read())

    def slab(self, node):
        return self.named("kvstore-" + node).ready("slab")

    # ---- end ----
    def reports(self):
        """Failed assertions and sanitizers' reports in the logs. A wire process may end by UCX's own abort: its kvstore
        goes on, which is what the round checks; wire_deaths counts them."""
        found = []
        for name in sorted(glob.glob(os.path.join(self.state, "logs", "*.log"))):
            with open(name, errors="replace") as f:
                text = f.read()
            self.wire_deaths += text.count("ev=wire_process_lost")
            text = sanitizer.in_log(text, killed=os.path.basename(name).startswith("kvstore"))
            found += [f"{os.path.basename(name)}: {text}"] if text else []
        return found

    def left(self):
        """What a stopped cluster has left: processes, files in /dev/shm."""
        return [d.name for d in self.daemons if d.kind != "etcd" and d.alive()] + \
            glob.glob(f"/dev/shm/baton-{getattr(self, 'cluster_name', 'none')}-*")

    def stop(self, check=True):
        """In order: conductors, workers, kvstores, etcd. Returns what is wrong about their ends."""
        self.closing = True
        bad = []
        for kinds in ("conductor",), ("prefill", "decode"), ("kvstore",):
            for d in self.kind(*kinds):
                d.planned = True
                d.signal(signal.SIGCONT)
                d.signal(signal.SIGTERM)
            end = time.monotonic() + 20 * PATIENCE
            for d in self.kind(*kinds):
                while d.alive() and time.monotonic() < end:
                    if d.child is not None:
                        d.child.poll()
                    time.sleep(0.02)
                if d.alive():
                    bad.append(f"{d.name} did not end within 20 s of SIGTERM")
                    d.kill()
                elif d.child is not None and d.child.wait() != 0:
                    bad.append(f"{d.name} ended with {d.child.returncode} at SIGTERM")
        if check:
            bad += [f"{x} is left after the end" for x in self.left()]
        etcd = [d for d in self.kind("etcd")]
        for d in etcd:
            d.planned = True
            d.signal(signal.SIGCONT)
            d.signal(signal.SIGTERM)
            d.reap()
        if os.path.exists(self.state):
            subprocess.run([LOCAL, "down", "--dir", self.state], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=60 * PATIENCE)
        if self.net:
            self.net.end()
        return bad

    def keep_logs(self, folder):
        os.makedirs(folder, exist_ok=True)
        for what in "logs", "conf":
            src = os.path.join(self.state, what)
            if os.path.exists(src):
                shutil.copytree(src, os.path.join(folder, what), dirs_exist_ok=True)

    def remove(self):
        for folder in self.mounted:
            subprocess.run(["umount", folder], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port():
    """A daemon that starts again takes the same one, so port 0 will not do."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Watch(threading.Thread):
    """Notices a daemon that ends although nobody meant it to, and how busy this machine is with other things."""

    def __init__(self, cluster, violation):
        super().__init__(daemon=True)
        self.cluster, self.violation = cluster, violation
        self.late = 0.0      # the longest that this thread was kept from running, lately
        self.busiest = 0.0
        self.stopping = False

    def slack(self):
        """Seconds by which answers may be later than on a machine of our own. The cluster itself has some eight threads
        to run at a time; a load above four times the cores is others'."""
        busy = max(0.0, os.getloadavg()[0] / (4 * len(os.sched_getaffinity(0))) - 1)
        self.busiest = max(self.busiest, busy)
        return self.late + 10 * busy

    def run(self):
        told, last = set(), time.monotonic()
        while not self.stopping:
            time.sleep(0.1)
            now = time.monotonic()
            self.late = max(now - last - 0.1, self.late * 0.995)
            last = now
            for d in self.cluster.daemons:
                if d.child is not None:
                    d.child.poll()
                if not d.planned and not self.cluster.closing and not d.alive() and not d.planned and (d.name, d.pid) not in told:
                    told.add((d.name, d.pid))
                    d.lost()
                    self.violation(f"{d.name} ended by itself" + (f" with {d.child.returncode}" if d.child else "") +
                                   "\n" + d.text()[-2500:])

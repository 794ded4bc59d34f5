"""A local cluster whose daemons are killed and started again: what a service manager would do."""
import json
import os
import signal
import subprocess
import time

from conftest import CTL, Cluster, scrape, wait_for
from local_cluster import connection
from sanitizer import PATIENCE

SLOW_MS = 50  # what a step takes longer until something has happened to what runs


def args_of(pid):
    """(argv, environment, working directory) of a running process."""
    with open(f"/proc/{pid}/cmdline") as f:
        argv = f.read().split("\0")[:-1]
    with open(f"/proc/{pid}/environ") as f:
        env = dict(e.split("=", 1) for e in f.read().split("\0") if "=" in e)
    return argv, env, os.readlink(f"/proc/{pid}/cwd")


class Restarts:
    """Members are those that the conductor knows (batonctl nodes): they change with every start."""

    def __init__(self, *options, **more):
        self.c = Cluster(*options, **more)
        self.children = []
        self.killed = None  # by with_a_kill
        with open(os.path.join(self.c.state_dir, "conductor.addr")) as f:
            self.addr = f.read().strip()
        # A cluster serves before its conductor has met everybody.
        n = len([d for d in self.c.status() if d["daemon"] not in ("etcd", "conductor")])
        try:
            wait_for(lambda: len([m for m in self.members() if m["session_up"]]) == n, 30, f"{n} sessions")
        except AssertionError:
            self.stop()
            raise
        self.args = {(m["kind"], m["name"]): args_of(m["pid"]) for m in self.members()}

    def stop(self):
        for p in self.children:
            if p.poll() is None:
                p.send_signal(signal.SIGCONT)
                p.terminate()
        for p in self.children:
            try:
                p.wait(15 * PATIENCE)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        self.c.stop()

    def ctl(self, *args):
        key = self.c.headers.get("Authorization", "").removeprefix("Bearer ")
        p = subprocess.run([CTL, "--addr", self.addr, *args, "-o", "json"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, timeout=20 * PATIENCE, env=dict(os.environ, BATON_API_KEY=key))
        assert p.returncode == 0, p.stderr
        return json.loads(p.stdout)

    def members(self, kind=None, node=None):
        return [m for m in self.ctl("nodes") if kind in (None, m["kind"]) and node in (None, m["node"])]

    def kill(self, kind, node):
        return self.kill_member(self.members(kind, node)[0])

    def kill_member(self, m):
        """At once: who it is was asked before."""
        os.kill(m["pid"], signal.SIGKILL)
        return m

    def spawn(self, argv, env, cwd, log):
        with open(os.path.join(self.c.state_dir, "logs", log), "a") as f:
            p = subprocess.Popen(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=f, stderr=f)
        self.children.append(p)
        return p

    def start_again(self, m):
        """Starts a killed daemon, again if it may not join yet."""
        p, begun = None, time.monotonic()
        end = begun + 60 * PATIENCE  # the dead one's name is free after 5 s
        while time.monotonic() < end:
            if p is None or p.poll() is not None:
                p = self.spawn(*self.args[m["kind"], m["name"]], m["name"] + ".log")
            now = self.members(m["kind"], m["node"])
            if now and now[0]["pid"] == p.pid and now[0]["session_up"] and self.c_serves(now[0]):
                return now[0]
            time.sleep(0.1)
        raise AssertionError(f"{m['name']} did not come back in {time.monotonic() - begun:.0f} s; {now}\n{self.c.logs()[-6000:]}")

    def c_serves(self, m):
        try:
            return m["state"] == "ready" and bool(scrape(m["http"]))
        except OSError:
            return False

    def total(self, name):
        return sum(v for k, v in self.c.metrics("conductor").items() if k.startswith(name))

    def running(self, kind):
        """Running requests of each node's worker, as they say themselves."""
        out = {}
        for m in self.members(kind):
            if m["session_up"]:
                v = scrape(m["http"])
                out[m["node"]] = sum(x for k, x in v.items() if k.startswith("baton_worker_requests_running"))
        return out

    def open_requests(self):
        return json.loads(self.c.request("GET", "/admin/v1/requests")[2])["open"]["list"]

    def kill_busiest(self, kind):
        """Kills the prefill or decode worker of the open request that has the fewest tokens, and returns its member. The
        worker stands still while the conductor is asked once more, so that none of its requests ends before its death.
        Steps are to be slow (Cluster.pace): what the worker has sent before may be on its way to the conductor."""
        state = {"decode": "decoding", "prefill": "prefilling"}[kind]
        members = {m["name"]: m for m in self.members(kind)}

        def rows():
            return [(x["tokens"], x[kind]) for x in self.open_requests() if x["state"] == state and x.get(kind) in members]

        def stopped():
            found = rows()
            if not found:
                return None
            m = members[min(found)[1]]
            os.kill(m["pid"], signal.SIGSTOP)
            if any(name == m["name"] for _, name in rows()):
                return m
            os.kill(m["pid"], signal.SIGCONT)
            return None
        return self.kill_member(wait_for(stopped, 10, f"a {kind} worker runs a request", every_s=0.001))

    def with_a_kill(self, path, body, at):
        """A stream's events. Behind `at` of them its decode worker is killed, which self.killed is then; until that steps are
        slow, so that the stream does not end before."""
        self.c.pace(SLOW_MS)
        try:
            for i, e in enumerate(self.c.stream(path, body)):
                if i == at:
                    self.killed = self.kill_busiest("decode")
                    self.c.pace(0)
                yield e
        finally:
            self.c.pace(0)

    def second_conductor(self):
        """Another conductor of the same cluster; (process, host, port)."""
        argv, env, cwd = self.args["conductor", self.members("conductor")[0]["name"]]
        p = self.spawn([*argv, "--set", "conductor.name=conductor-b", "--set",
                        "conductor.http.listen=127.0.0.1:0", "--set", "rpc.listen=127.0.0.1:0"],
                       env, cwd, "conductor-b.log")
        m = wait_for(lambda: [x for x in self.members("conductor") if x["name"] == "conductor-b"], 15,
                     "the second conductor joins")[0]
        host, port = m["http"].rsplit(":", 1)

        def healthy():
            c = connection(host, int(port), 60 * PATIENCE, self.c.tls)
            try:
                c.request("GET", "/health")
                return c.getresponse().status == 200
            except OSError:
                return False
            finally:
                c.close()

        wait_for(healthy, 15, "it serves")
        return p, host, int(port)

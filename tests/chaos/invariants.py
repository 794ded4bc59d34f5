"""What must hold once no request is open: every daemon has given back what it held, and is as large as it was before."""
import http.client
import json
import os
import re
import threading
import time
from collections import Counter

from cluster import PATIENCE, scrape

ZERO = {  # by kind: gauges that are 0 on a quiet daemon (beginnings of names)
    "kvstore": ("baton_pool_leases", 'baton_pool_slots{state="writing"}', 'baton_pool_slots{state="quarantine"}',
                "baton_kvstore_grants", "baton_kvstore_opens", "baton_kvstore_offers", "baton_kvstore_fetching",
                "baton_pool_transit_slots", "baton_kvstore_stream_slots", "baton_kvstore_tail_slots"),
    "prefill": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "conductor": ("vllm:num_requests_running", "vllm:num_requests_waiting", "baton_http_generations_open"),
}
ZERO["decode"] = ZERO["prefill"]
# More than the first quiet moment had, threads and memory: gRPC starts threads, pools of memory grow up to a bound.
# Descriptors: what each wire session of a kvstore has is counted apart, and so are the files of RocksDB, which come and go.
# A session that is up has a UCX worker (a listening socket, an eventfd, two epoll sets, a timer) and a connection each of UCX and
# gRPC; there are two with each peer, one a direction, and they begin when they are first used.
SESSION_FDS = 7
MORE_FDS = 4  # one that is kept to turn clients away (common/loop/accept.c), connections that are just being closed
MORE_THREADS = 12
MORE_RSS = 96 << 20


STATES = {"01": "", "08": " (its peer has closed it)"}


def socket_kinds(pid):
    """inode -> what the socket is, as the process's network namespace has it."""
    out = {}
    for table in "tcp", "tcp6":
        with open(f"/proc/{pid}/net/{table}") as f:
            for line in f.readlines()[1:]:
                w = line.split()
                at, there = (int(x.rpartition(":")[2], 16) for x in w[1:3])
                out[w[9]] = f"socket: listens at {at}" if w[3] == "0A" else f"socket: {at} to {there} {w[3]}"
    with open(f"/proc/{pid}/net/unix") as f:
        for line in f.readlines()[1:]:
            w = line.split()
            out[w[6]] = "socket: unix " + (w[7] if len(w) > 7 else "")
    return out


def descriptors(pid):
    """What its descriptors are: kind -> number of them. Ports that change with each connection are left out."""
    out, sockets = Counter(), socket_kinds(pid)
    listens = {k.rsplit(" ", 1)[1] for k in sockets.values() if k.startswith("socket: listens")}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            to = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if to.startswith("socket:["):
            to = sockets.get(to[len("socket:["):-1], "socket: other")
            m = re.fullmatch(r"socket: (\d+) to (\d+) (\w+)", to)
            if m:
                to = ("socket: accepted" if m[1] in listens else "socket: dialed") + STATES.get(m[3], f" (state {m[3]})")
        out[re.sub(r"\[\d+\]|\d{6}|\d+$", "", to)] += 1
    return out


def size_of(pids):
    """Descriptors, threads, anonymous memory of a daemon and its child processes."""
    out = {"fds": 0, "threads": 0, "rss": 0, "what": Counter()}
    for pid in pids:
        with open(f"/proc/{pid}/status") as f:
            v = dict(line.split(":", 1) for line in f if ":" in line)
        kinds = descriptors(pid)
        out["fds"] += sum(kinds.values())
        out["what"] += kinds
        out["threads"] += int(v["Threads"])
        out["rss"] += int(v["RssAnon"].split()[0]) << 10
    return out


def more(now, base):
    """The kinds of descriptors of which there are more than at first."""
    return ", ".join(f"{n} {kind}" for kind, n in (now["what"] - base["what"]).most_common(12))


class Invariants:
    def __init__(self, cluster, violation):
        self.cluster, self.violation = cluster, violation
        self.base = {}
        self.most = {}
        self.most_descriptors = {}  # daemon -> (how many more than at first, of which kinds)
        self.lock = threading.Lock()

    def daemons(self):
        return [d for d in self.cluster.daemons if d.kind != "etcd"]

    def address(self, d):
        for c in self.cluster.conductors():
            if c.daemon is d:
                return f"{c.host}:{c.port}"
        return d.ready()

    def held(self):
        """What is not given back, in words; empty if nothing."""
        found, index = [], {}
        for d in self.daemons():
            try:
                m = scrape(self.address(d))
            except (OSError, AssertionError, http.client.HTTPException) as e:
                return f"{d.name} does not tell its metrics: {e!r}"
            for k, v in m.items():
                if v != 0 and k.startswith(ZERO[d.kind]) and "_total" not in k:
                    found.append(f"{d.name}: {k} {v:g}")
            if d.kind == "conductor":
                index[d.name] = m["baton_index_blocks"]
        if len(set(index.values())) > 1:
            found.append(f"the conductors' indexes differ: {index}")
        return "; ".join(found)

    def quiet(self, seconds=30):
        """Waits until nothing is held, for a moment on end, then compares sizes. True if all is well."""
        end, calm = time.monotonic() + seconds * PATIENCE, None
        while True:
            held = self.cluster.all_up() or self.held()
            if not held:
                calm = calm or time.monotonic()
                if time.monotonic() - calm > 0.3:
                    break
            else:
                calm = None
            if time.monotonic() > end:
                self.violation(f"not quiet {seconds} s after the last request: {held}\n{self.requests()}{self.index_differences()}")
                return False
            time.sleep(0.1)
        return self.sizes(end)

    def requests(self):
        out = []
        for c in self.cluster.conductors():
            try:
                out.append(f"{c.daemon.name}: {self.cluster.ctl('requests', conductor=c).stdout}")
            except Exception as e:  # only more words for a failure that is told anyway
                out.append(f"{c.daemon.name}: {e!r}")
        return "\n".join(out)

    def index_differences(self):
        """Blocks that only one conductor believes to be somewhere; their keys in full are in the kept logs."""
        sets = {}
        for c in self.cluster.conductors():
            try:
                told = self.cluster.ctl_json("blocks", "--limit", "10000", conductor=c)
            except (OSError, ValueError) as e:
                return f"; blocks of {c.daemon.name}: {e}"
            with open(os.path.join(self.cluster.state, "logs", f"blocks-{c.daemon.name}.log"), "w") as f:
                json.dump(told, f, indent=0)
            sets[c.daemon.name] = {f"{b['key'][:16]} at {', '.join(sorted(b['kvstores']))}" for b in told["list"]}
        (a, of_a), (b, of_b) = sets.items()
        return f"; only {a}: {sorted(of_a - of_b)[:5]}; only {b}: {sorted(of_b - of_a)[:5]}" if of_a != of_b else ""

    def size_of(self, d):
        """Without the descriptors of sessions that are up and of RocksDB."""
        size = size_of(d.family())
        if d.kind == "kvstore":
            size["fds"] -= SESSION_FDS * int(scrape(self.address(d))["baton_kv_peer_sessions"])
            size["fds"] -= sum(n for kind, n in size["what"].items() if "/ssd/index/" in kind)
        return size

    def sizes(self, end):
        """Compares with the first quiet moment of a daemon of that name. Connections may take a while to be closed."""
        while True:
            now = {d.name: (d.kind, self.size_of(d)) for d in self.daemons()}
            if not self.base:
                self.base = {name: s for name, (_, s) in now.items()}
            bad = []
            for name, (kind, s) in now.items():
                grown = s["fds"] - self.base[name]["fds"]
                if grown > self.most_descriptors.get(name, (0, ""))[0]:
                    self.most_descriptors[name] = grown, more(s, self.base[name])
                for what, most in ("fds", MORE_FDS), ("threads", MORE_THREADS), ("rss", MORE_RSS):
                    self.most[kind, what] = max(self.most.get((kind, what), 0), s[what] - self.base[name][what])
                    if s[what] > self.base[name][what] + most:
                        bad.append(f"{name}: {what} {s[what]}, {self.base[name][what]} at first" +
                                   (f" ({more(s, self.base[name])})" if what == "fds" else ""))
            if not bad:
                return True
            if time.monotonic() > end:
                self.violation("; ".join(bad))
                return False
            time.sleep(0.2)

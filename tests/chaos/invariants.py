"""What must hold once no request is open: every daemon has given back what it held, and is as large as it was before."""
import http.client
import json
import os
import threading
import time

from cluster import PATIENCE, scrape

ZERO = {  # by kind: gauges that are 0 on a quiet daemon (beginnings of names)
    "kvstore": ("baton_pool_leases", 'baton_pool_slots{state="writing"}', 'baton_pool_slots{state="quarantine"}',
                "baton_kvstore_grants", "baton_kvstore_opens", "baton_kvstore_offers", "baton_kvstore_fetching",
                "baton_pool_transit_slots", "baton_kvstore_stream_slots", "baton_kvstore_tail_slots"),
    "prefill": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "conductor": ("vllm:num_requests_running", "vllm:num_requests_waiting", "baton_http_generations_open"),
}
ZERO["decode"] = ZERO["prefill"]
# More than the first quiet moment had. They grow with use up to a bound: RocksDB opens files, gRPC starts threads, and wire
# sessions with two peers, which may be down at that moment on a busy machine, have some 30 sockets.
MORE_FDS = {"kvstore": 56, "conductor": 12, "prefill": 8, "decode": 8}
MORE_THREADS = 12
MORE_RSS = 96 << 20


def size_of(pid):
    """Descriptors, threads, anonymous memory."""
    with open(f"/proc/{pid}/status") as f:
        v = dict(line.split(":", 1) for line in f if ":" in line)
    return {"fds": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(v["Threads"]), "rss": int(v["RssAnon"].split()[0]) << 10}


class Invariants:
    def __init__(self, cluster, violation):
        self.cluster, self.violation = cluster, violation
        self.base = {}
        self.most = {}
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

    def sizes(self, end):
        """Compares with the first quiet moment of a daemon of that name. Connections may take a while to be closed."""
        while True:
            now = {d.name: (d.kind, size_of(d.pid)) for d in self.daemons()}
            if not self.base:
                self.base = {name: s for name, (_, s) in now.items()}
            bad = []
            for name, (kind, s) in now.items():
                for what, more in ("fds", MORE_FDS[kind]), ("threads", MORE_THREADS), ("rss", MORE_RSS):
                    self.most[kind, what] = max(self.most.get((kind, what), 0), s[what] - self.base[name][what])
                    if s[what] > self.base[name][what] + more:
                        bad.append(f"{name}: {what} {s[what]}, {self.base[name][what]} at first")
            if not bad:
                return True
            if time.monotonic() > end:
                self.violation("; ".join(bad))
                return False
            time.sleep(0.2)

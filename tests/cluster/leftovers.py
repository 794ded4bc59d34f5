"""What a burst of requests leaves behind: leases, slots being written, file descriptors, memory."""
import os

import sanitizer
from conftest import scrape, wait_for


def usage_of(cluster):
    """Leases, slots, fds and memory of every daemon."""
    out = {}
    for d in cluster.status():
        if d["daemon"] == "etcd":
            continue
        key = d["daemon"], d["node"]
        with open(f"/proc/{d['pid']}/status") as f:  # not the mapped slab, which counts as shared
            rss = [int(li.split()[1]) << 10 for li in f if li.startswith("RssAnon")][0]
        out[key] = {"fds": len(os.listdir(f"/proc/{d['pid']}/fd")), "rss": rss}
        if d["daemon"] == "kvstore":
            m = scrape(d["http"])
            out[key]["leases"] = m["baton_pool_leases"]
            out[key]["writing"] = m['baton_pool_slots{state="writing"}']
    return out


def settled(cluster):
    """usage_of() once no lease is held."""
    wait_for(lambda: all(u.get("leases", 0) == 0 for u in usage_of(cluster).values()), 10, "no leases")
    return usage_of(cluster)


def assert_nothing_left(cluster, before, rss):
    """No lease, no WRITING slot, no fd and at most `rss` bytes a daemon more than `before`."""
    def quiet():
        now = usage_of(cluster)
        return now if all(u.get("leases", 0) == 0 and u.get("writing", 0) == 0 for u in now.values()) else None

    for key, u in wait_for(quiet, 30, "no lease and no WRITING slot").items():
        assert u["fds"] <= before[key]["fds"] + 2, (key, before[key], u)
        if not sanitizer.KIND:  # a sanitizer keeps what is freed
            assert u["rss"] <= before[key]["rss"] + rss, (key, before[key], u)

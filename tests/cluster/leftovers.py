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


def quiet_usage(cluster):
    """usage_of(), or None while anything is leased or written."""
    now = usage_of(cluster)
    return now if all(u.get("leases", 0) == 0 and u.get("writing", 0) == 0 for u in now.values()) else None


def settled(cluster):
    """usage_of() once nothing is leased or written any more."""
    return wait_for(lambda: quiet_usage(cluster), 30, "no lease and no WRITING slot")


def assert_nothing_left(cluster, before, rss):
    """No lease, no WRITING slot, no fd and at most `rss` bytes a daemon more than `before`."""
    for key, u in settled(cluster).items():
        assert u["fds"] <= before[key]["fds"] + 2, (key, before[key], u)
        if not sanitizer.KIND:  # a sanitizer keeps what is freed
            assert u["rss"] <= before[key]["rss"] + rss, (key, before[key], u)

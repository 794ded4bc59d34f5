"""Faults of kvstores and their disks, of descriptors and clocks."""
import glob
import os
import re
import resource
import signal
import socket
import struct
import time

import crash_losses
from cluster import NODES, SHIMMED_DISK, wait_for
from fault import a_worker, fault, healthy, listening, restart


@fault([11, 12, 36], "kvstore")
def kvstore_killed(x):
    """With workers' leases and transfers under way."""
    d = a_worker(x, "kvstore")
    x.note(d.name)
    d.kill()
    restart(x, d, 1.0)


@fault([36], "kvstore")
def wire_process_killed(x):
    """The process that has UCX, of one kvstore, or it stands still for good. The kvstore goes on."""
    d = a_worker(x, "kvstore")
    number = x.rng.choice([signal.SIGKILL, signal.SIGSTOP])
    x.note(f"{d.name} {signal.Signals(number).name}")
    for pid in d.family()[1:]:
        os.kill(pid, number)


@fault([13], "kvstore")
def kvstore_killed_again_and_again(x):
    """At random moments of its writes, and while it starts."""
    d = a_worker(x, "kvstore")
    x.note(d.name)
    for _ in range(x.rng.randrange(2, 4)):
        d.kill()
        d.spawn()
        time.sleep(x.rng.uniform(0, 1.0))
    if d.alive():
        d.kill()
    d.start_again()


@fault([3, 10], "kvstore")
def kvstore_stopped(x):
    d = a_worker(x, "kvstore")
    seconds = x.rng.choice([1, 3])
    x.note(f"{d.name} for {seconds} s")
    for w in x.cluster.kind("prefill", "decode"):
        if w.node == d.node:
            w.lost()
    d.signal_all(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        d.signal_all(signal.SIGCONT)


def ssd_of(x, node):
    return os.path.join(x.cluster.disks[node], "ssd")


def ssd_works(x, node):
    wait_for(lambda: x.cluster.named("kvstore-" + node).metrics().get("baton_ssd_up") == 1, 30, f"the SSD of {node} is used again")


@fault([14], "disk", "disk")
def disk_full(x):
    node = x.rng.choice(NODES)
    x.note(node)
    name = os.path.join(x.cluster.disks[node], "others")
    try:
        with open(name, "wb", buffering=0) as f:
            try:
                while f.write(bytes(1 << 16)) == 1 << 16:
                    pass
            except OSError:
                pass
        time.sleep(x.rng.uniform(1, 4))
    finally:
        os.unlink(name)
    ssd_works(x, node)


@fault([15, 17], "disk")
def disk_fails(x):
    """Reads and writes end with EIO, behind the first few: what they were for is computed, or not kept."""
    x.note(SHIMMED_DISK)
    with open(x.cluster.disk_fails + ".new", "w") as f:
        f.write(str(x.rng.randrange(20)))
    os.rename(x.cluster.disk_fails + ".new", x.cluster.disk_fails)
    try:
        time.sleep(x.rng.uniform(1, 4))
    finally:
        os.unlink(x.cluster.disk_fails)
    ssd_works(x, SHIMMED_DISK)


def slab_file(folder):
    """The SSD's slab file: the largest there."""
    return max((p for p in glob.glob(folder + "/**", recursive=True) if os.path.isfile(p)), key=os.path.getsize)


@fault([16, 17], "disk")
def ssd_damaged(x):
    """Bits turned over, and places swapped, in the file under a kvstore that runs. What is wrong is never served."""
    node = x.rng.choice(NODES)
    with open(slab_file(ssd_of(x, node)), "r+b", buffering=0) as f:
        size = os.fstat(f.fileno()).st_size
        for _ in range(300):
            at = x.rng.randrange(size)
            b = os.pread(f.fileno(), 1, at)
            os.pwrite(f.fileno(), bytes([b[0] ^ 1 << x.rng.randrange(8)]), at)
        slot = 49152  # of the small model
        for _ in range(100):
            a, b = (x.rng.randrange(size // slot) * slot for _ in range(2))
            data = os.pread(f.fileno(), slot, a), os.pread(f.fileno(), slot, b)
            os.pwrite(f.fileno(), data[1], a)
            os.pwrite(f.fileno(), data[0], b)
    x.note(node)
    time.sleep(x.rng.uniform(2, 4))


@fault([16], "kvstore")
def slab_damaged_while_down(x):
    """Bits of sealed blocks, headers and checksums turn over between two kvstores: the next one finds each."""
    d = a_worker(x, "kvstore")
    path = d.ready("slab")
    d.kill()
    with open(path, "r+b", buffering=0) as f:
        slots, slot_bytes, block_bytes = struct.unpack("<IQQ", os.pread(f.fileno(), 20, 12))
        headers, crcs, flows, data = struct.unpack("<4Q", os.pread(f.fileno(), 32, crash_losses.HEADERS_OFF))
        states = os.pread(f.fileno(), slots * crash_losses.HEADER_BYTES, headers)[::crash_losses.HEADER_BYTES]
        sealed = [i for i, s in enumerate(states) if s == crash_losses.SEALED]
        hit = x.rng.sample(sealed, min(20, len(sealed)))
        in_data = {i for i in hit if x.rng.random() < 0.6}
        for i in hit:
            at = data + i * slot_bytes + x.rng.randrange(block_bytes) if i in in_data else \
                headers + i * crash_losses.HEADER_BYTES + 8 + x.rng.randrange(56)
            b = os.pread(f.fileno(), 1, at)
            os.pwrite(f.fileno(), bytes([b[0] ^ 1 << x.rng.randrange(8)]), at)
    x.note(f"{d.name}, {len(hit)} blocks")
    d.start_again()
    adopted = re.search(r"ev=slab_adopted slots=\d+ headers=(\d+)", d.text())
    if adopted:  # else it was made anew, which is also right: a worker may have held it too long
        m = wait_for(lambda: re.search(r"ev=slab_checked blocks=(\d+) bad=(\d+)", d.text()), 30, "the slab is checked")
        taken, checked, bad = int(adopted[1]), int(m[1]), int(m[2])
        if taken > len(sealed) - len(hit) + len(in_data) or bad < len(in_data) - (taken - checked):
            raise AssertionError(f"of {len(sealed)} sealed blocks {len(in_data)} were damaged and {len(hit) - len(in_data)} had damaged "
                                 f"headers: {taken} were taken over, {checked} checked, {bad} found bad")


@fault([18], "kvstore disk")
def index_damaged_while_down(x):
    """A file of RocksDB is cut, overwritten or gone: the tier starts, with what it can prove or empty."""
    d = a_worker(x, "kvstore")
    big = slab_file(ssd_of(x, d.node))
    d.kill()
    files = [p for p in glob.glob(ssd_of(x, d.node) + "/**", recursive=True) if os.path.isfile(p) and p != big]
    for path in x.rng.sample(sorted(files), min(2, len(files))):
        how = x.rng.choice(["cut", "garbage", "gone"])
        x.note(f"{d.name}: {os.path.basename(path)} {how}")
        size = os.path.getsize(path)
        if how == "gone":
            os.unlink(path)
        elif how == "cut":
            os.truncate(path, size // 2)
        else:
            with open(path, "r+b") as f:
                f.seek(x.rng.randrange(size + 1))
                f.write(x.rng.randbytes(64))
    d.start_again()
    ssd_works(x, d.node)


# ---- descriptors, clocks ----

def descriptors_short(x, d, dials, seconds, meanwhile=lambda: None):
    """Leaves its processes as many descriptors as they have, and dials each port of theirs so many times; meanwhile()
    is called then."""
    host, pids, sockets = d.address("rpc")[0], d.family(), []
    ports = listening(pids)
    was = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    for pid, (_, hard) in was.items():
        highest = max(int(n) for n in os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        for port in ports * dials:
            s = socket.socket()
            s.settimeout(1)
            try:
                s.connect((host, port))
            except OSError:
                pass
            sockets.append(s)
        time.sleep(seconds)
        meanwhile()
    finally:
        for pid in pids:
            if d.alive():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, was[pid])
        for s in sockets:
            s.close()


@fault([20], "conductor")
def conductor_without_descriptors(x):
    """batonctl says that it has no answer and from where, within its 10 s; when descriptors are free again, it has one."""
    c = x.rng.choice(x.cluster.conductors())
    x.note(c.daemon.name)
    away = [time.monotonic(), None, False]
    c.away.append(away)

    def asked():
        p = x.cluster.ctl("nodes", conductor=c)
        if p.returncode not in (0, 1) or p.returncode == 1 and c.daemon.ready("rpc") not in p.stderr:
            raise AssertionError(f"batonctl of a conductor without descriptors: {p.returncode} {p.stderr[:500]}")
        x.note("batonctl had an answer" if p.returncode == 0 else "batonctl had no answer")

    try:
        descriptors_short(x, c.daemon, 20, x.rng.uniform(1, 3), asked)
    finally:
        away[1] = time.monotonic()
    wait_for(lambda: healthy(c), 10, "it takes connections again")
    wait_for(lambda: x.cluster.ctl("nodes", conductor=c).returncode == 0, 10, "batonctl reaches it again")


@fault([20], "kvstore")
def daemon_without_descriptors(x):
    d = x.rng.choice(x.cluster.kind("kvstore", "prefill", "decode"))
    x.note(d.name)
    descriptors_short(x, d, 5, x.rng.uniform(1, 3))


@fault([37], "clock")
def wall_clock_set(x):
    """An hour forth or back, in both conductors and a kvstore, and back again: no time limit is told by it. Certificates
    begin a day before they are made (baton-certs), so they stay valid."""
    x.cluster.clock.jump(x.rng.choice([3600, -3600]))
    try:
        time.sleep(x.rng.uniform(2, 5))
    finally:
        x.cluster.clock.jump(0)

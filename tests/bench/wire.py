#!/usr/bin/python3
"""Throughput of the wire, slab to slab between two processes over TCP loopback, every CRC computed and
checked, in turns with others of the same segment size. Two of them are like for like, but for the CRCs:

  wire_Nk          256 MiB of blocks on either side, from memory; against ucx_perftest's active messages, which
                   are one buffer over and over, from the cache into the cache (Debian: ucx-utils; or
                   UCX_PERFTEST=path)
  wire_Nk_memory   the same; against UCX's active messages through as much memory (tests/tools/ucx_am.c); _cpu: the
                   CPU time of both sides, which depends less on what else the machine does
  wire_Nk_cache    one segment's memory over and over; against ucx_perftest
  wire_Nk_socket   as the first; against a plain socket through as much memory

Then the latency of a 64 KiB segment handed off behind a stream of replicas that takes all it gets. The best and
the median of the rounds; ratios are of the bests. Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO.

    tests/bench/wire.py [ROUNDS]
    tests/bench/wire.py transports [ROUNDS]    KV over UCX, over gRPC with TLS and over gRPC without, in turns
"""
import mmap
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
from wire_peers import Certificates, Peer, transport_opts  # noqa: E402

SPAN, FLOWS, LAYERS, PAGE = 256 << 20, 4, 8, 16
TOTAL = SPAN * FLOWS
SEGMENTS = (1024, 256, 64, 16)  # KiB
WINDOW = 4 << 20  # bytes in flight, as kvstore.wire.bytes_in_flight_max is by default
UCX_AM = os.path.join(ROOT, os.environ.get("BUILD", "build"), "tests", "tools", "ucx_am")
PERFTEST = os.environ.get("UCX_PERFTEST") or shutil.which("ucx_perftest")
# As kvstore/wire/ucx_context.c sets it. ucx_perftest is also run with UCX's own choices, and either polling all the time
# (which two processes cannot on two cores that others use as well) or sleeping as we do: the best counts.
OURS = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_TCP_TX_SEG_SIZE": "512K", "UCX_TCP_RX_SEG_SIZE": "512K",
        "UCX_RNDV_SCHEME": "get_zcopy", "UCX_ZCOPY_THRESH": "128K"}
DEFAULT = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def cpu_of(who):
    u = resource.getrusage(who)
    return u.ru_utime + u.ru_stime


def plain_socket(size):
    """(GB/s, sender's and receiver's CPU s/GB) of send/recv_into of `size` bytes over SPAN bytes on both
    sides; no checks."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        s = socket.create_connection(listener.getsockname())
        buf = memoryview(mmap.mmap(-1, SPAN))
        for i in range(0, SPAN, 4096):
            buf[i] = 1
        s.recv(1)
        before = cpu_of(resource.RUSAGE_SELF)
        for at in range(0, TOTAL, size):
            s.sendall(buf[at % SPAN:at % SPAN + size])
        s.sendall(b"%-32f" % (cpu_of(resource.RUSAGE_SELF) - before))
        s.close()
        os._exit(0)
    conn, _ = listener.accept()
    buf = memoryview(mmap.mmap(-1, SPAN))
    for i in range(0, SPAN, 4096):
        buf[i] = 1
    conn.sendall(b"x")
    start, before, got = time.monotonic(), cpu_of(resource.RUSAGE_SELF), 0
    while got < TOTAL:
        n = conn.recv_into(buf[got % SPAN:], min(size, SPAN - got % SPAN), socket.MSG_WAITALL)
        if n == 0:
            break
        got += n
    seconds, cpu = time.monotonic() - start, cpu_of(resource.RUSAGE_SELF) - before
    other = float(conn.recv(32, socket.MSG_WAITALL))
    conn.close()
    listener.close()
    os.waitpid(pid, 0)
    return got / seconds / 1e9, other * 1e9 / got, cpu * 1e9 / got


def perftest_once(size, settings, mode):
    env, port = {**os.environ, **settings, "UCX_WARN_UNUSED_ENV_VARS": "n"}, str(free_port())
    server = subprocess.Popen([PERFTEST, "-p", port], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(40):  # it says nothing when it listens
            out = subprocess.run([PERFTEST, "127.0.0.1", "-p", port, "-t", "ucp_am_bw", "-s", str(size), "-n",
                                  str(TOTAL // 2 // size), "-w", "20", "-f", "-E", mode], env=env,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
            rows = [x.split() for x in out.splitlines() if re.match(r"\s*\d", x)]
            if rows:
                return float(rows[-1][5]) * (1 << 20) / 1e9  # overall; its MB are 2^20 bytes
            time.sleep(0.05)
        raise SystemExit(f"{PERFTEST} gives no result: {out}")
    finally:
        server.kill()
        server.wait()


def perftest(size):
    """GB/s of ucp_am_bw, one buffer of `size` over and over on both sides."""
    return max(perftest_once(size, s, mode) for s in (OURS, DEFAULT) for mode in ("poll", "sleep"))


def ucx_alone(size):
    """(GB/s, CPU s/GB of both sides) of UCX's active messages through SPAN bytes on both sides; the best of our
    settings and UCX's own, of each."""
    out = []
    for settings in (OURS, DEFAULT):
        env = {**os.environ, **settings, "UCX_WARN_UNUSED_ENV_VARS": "n"}
        p = subprocess.run([UCX_AM, str(size), str(SPAN), str(TOTAL), str(WINDOW)], env=env, check=True,
                           stdout=subprocess.PIPE, text=True)
        out.append([float(x) for x in re.findall(r"=(\S+)", p.stdout)])
    return max(x[0] for x in out), min(x[1] + x[2] for x in out)


class Pair:
    """Two kvstore wires with segments of so many KiB; flows of SPAN bytes one after the other, messages of 1 MiB
    at most. cached: all blocks are one slot, of one segment, and every CRC is computed all the same."""

    def __init__(self, kib, cached=False, more=lambda name: {}):
        layers = 1 if cached else LAYERS
        self.blocks = SPAN // ((kib << 10) * layers)
        opts = dict(seg=kib << 10, layers=layers)
        opts.update(dict(slots=4, distinct=1, fresh=1) if cached else dict(slots=self.blocks * 2 + 4))
        self.a, self.b = (Peer(name, **opts, **more(name)) for name in "ab")
        self.tokens, self.chunk = self.blocks * PAGE, PAGE * max(1, min(1024 // kib, self.blocks))
        self.a.ask(f"auto {self.tokens} {self.chunk} 9", "auto", 60)
        self.storm(2, 1)  # checked byte by byte

    def storm(self, n, verify):
        a = self.a
        return self.b.ask(f"storm a {a.addr} {a.inc} 10 {n} {self.tokens} {self.chunk} 9 {verify} 1",
                          rf"storm done={n} failed=0 bytes=(\d+) seconds=(\S+)", 120)

    def run(self):
        """(GB/s, sender's and receiver's CPU s/GB)"""
        before = self.a.usage()["cpu_s"], self.b.usage()["cpu_s"]
        m = self.storm(FLOWS, 0)
        cpu = self.a.usage()["cpu_s"] - before[0], self.b.usage()["cpu_s"] - before[1]
        return int(m[1]) / float(m[2]) / 1e9, cpu[0] * 1e9 / int(m[1]), cpu[1] * 1e9 / int(m[1])

    def crc(self):
        m = self.a.ask("crc", r"crc bytes=(\d+) cpu_us=(\d+)", 60)
        return int(m[2]) * 1e3 / int(m[1])

    def stop(self):
        self.a.stop()
        self.b.stop()


def best(rows, at=0):
    return max(x[at] for x in rows)


def throughput(kib, rounds, lines):
    pair, cached = Pair(kib), Pair(kib, cached=True)
    ours, hot, plain, ucx, alone, crc = [], [], [], [], [], []
    try:
        for _ in range(rounds):
            ours.append(pair.run())
            alone.append(ucx_alone(kib << 10))
            plain.append(plain_socket(kib << 10))
            hot.append(cached.run())
            if PERFTEST:
                ucx.append((perftest(kib << 10),))
            crc.append(pair.crc())
    finally:
        pair.stop()
        cached.stop()
    least = min(crc)
    cpu = [min(x[i] for x in ours) for i in (1, 2)]
    allowed = [1.5 * min(x[i] for x in plain) + least for i in (1, 2)]
    rows = {"wire": ours, "UCX alone": alone, "plain socket": plain, "wire cached": hot, "ucx_perftest": ucx}
    print(f"{kib} KiB, {rounds} rounds, best (median) GB/s: "
          + ", ".join(f"{n} {best(r):.2f} ({statistics.median(x[0] for x in r):.2f})" for n, r in rows.items() if r)
          + f"; CPU s/GB sender {cpu[0]:.3f}, receiver {cpu[1]:.3f}, the CRC alone {least:.3f}", flush=True)
    pairs = [("", ours, "ucx_perftest", ucx), ("_memory", ours, "UCX alone", alone), ("_cache", hot, "ucx_perftest", ucx),
             ("_socket", ours, "plain socket", plain)]
    for name, mine, other, theirs in pairs:
        if theirs:
            lines.append(f"bench,wire_{kib}k{name},{best(mine):.2f},GB/s,{other} {best(theirs):.2f},"
                         f"{best(mine) / best(theirs):.2f}")
    both = min(x[1] + x[2] for x in ours), min(x[1] for x in alone)
    lines.append(f"bench,wire_{kib}k_memory_cpu,{both[0]:.3f},CPU s/GB of both sides,UCX alone {both[1]:.3f},"
                 f"{both[0] / both[1]:.2f}")
    for who, have, may in zip(("sender", "receiver"), cpu, allowed):
        lines.append(f"bench,wire_{kib}k_cpu_{who},{have:.3f},CPU s/GB,1.5 x plain socket and CRC {may:.3f},{have / may:.2f}")


def transports(rounds, lines):
    """What KV costs over gRPC beside UCX, and what of that is TLS."""
    certificates = Certificates()

    def opts_of(kind):
        return lambda name: dict(grpc=1) if kind == "grpc" else transport_opts(kind, certificates, name)
    for kib in SEGMENTS:
        pairs = {kind: Pair(kib, more=opts_of(kind)) for kind in ("ucx", "grpc-tls", "grpc")}
        rows = {kind: [] for kind in pairs}
        try:
            for _ in range(rounds):
                for kind, pair in pairs.items():
                    rows[kind].append(pair.run())
        finally:
            for pair in pairs.values():
                pair.stop()
        cpu = {kind: min(x[1] + x[2] for x in r) for kind, r in rows.items()}
        print(f"{kib} KiB, {rounds} rounds, best (median) GB/s, CPU s/GB of both sides: " + ", ".join(
            f"{kind} {best(r):.2f} ({statistics.median(x[0] for x in r):.2f}), {cpu[kind]:.2f}"
            for kind, r in rows.items()), flush=True)
        for kind, r in rows.items():
            if kind != "ucx":
                name = f"wire_{kib}k_{kind.replace('-', '_')}"
                lines.append(f"bench,{name},{best(r):.2f},GB/s,UCX {best(rows['ucx']):.2f},{best(r) / best(rows['ucx']):.2f}")
                lines.append(f"bench,{name}_cpu,{cpu[kind]:.3f},CPU s/GB of both sides,UCX {cpu['ucx']:.3f},"
                             f"{cpu[kind] / cpu['ucx']:.2f}")
    handoffs(lines, "_grpc_tls", opts_of("grpc-tls"))


def latencies(behind, more):
    """ms from raising an item of one 64 KiB segment at a until b's kvstore has it; behind: replicas of
    class 2 go the same way as fast as they are taken."""
    items, opts = 800, dict(seg=65536, layers=1, slots=2700)
    a, b = (Peer(name, **opts, **more(name)) for name in "ab")
    try:
        a.grant(1, 1, 500 * PAGE, PAGE, 5)  # what is replicated: 500 blocks of 64 KiB
        a.grant(2, 1, items * PAGE, PAGE, 6)
        b.recv(a, 2, 1, items * PAGE, PAGE)
        a.wait("lookup 2")
        out, n, running = [], 100, []

        def replicate():
            nonlocal n
            while behind and len(running) < 3:
                b.say(f"fetch a {a.addr} {a.inc} {n} 1 0 500 2")
                running.append(n)
                n += 1
        for i in range(1, items + 1):
            replicate()
            for r in [r for r in running if b.has(rf"^quiet {r}$")]:
                running.remove(r)
                b.say(f"forget {r}")
            t = a.ask(f"raise 2 {i}", rf"raised 2 {i} at=(\d+)")
            m = b.wait(rf"progress 2 {i} at=(\d+)", 20)
            out.append((int(m[1]) - int(t[1])) / 1e6)
            time.sleep(0.002)
        bytes_ = b.metrics()["baton_kv_received_bytes_total"] - items * 65536
        for r in running:
            b.wait(rf"^quiet {r}$", 20)
        a.say("trailer 2 1 0")
        b.wait("^quiet 2$", 20)
        return sorted(out), bytes_
    finally:
        a.kill()
        b.kill()


def handoffs(lines, suffix="", more=lambda name: {}):
    for name, behind in (("alone", False), ("behind_replicas", True)):
        start = time.monotonic()
        ms, moved = latencies(behind, more)
        p50, p99 = ms[len(ms) // 2], ms[int(len(ms) * 0.99)]
        print(f"a 64 KiB segment handed off, {name}{suffix}: p50 {p50:.2f}, p99 {p99:.2f}, max {ms[-1]:.2f} ms of {len(ms)}; "
              f"replicas beside it {moved / (time.monotonic() - start) / 1e9:.2f} GB/s", flush=True)
        lines.append(f"bench,wire_handoff_{name}{suffix}_p99,{p99:.2f},ms,target of 3 ms,{p99 / 3:.2f}")


def main():
    other = len(sys.argv) > 1 and sys.argv[1] == "transports"
    args = sys.argv[2:] if other else sys.argv[1:]
    rounds, lines = int(args[0]) if args else 5, []
    if other:
        transports(rounds, lines)
    else:
        if not PERFTEST:
            print("no ucx_perftest here: that comparison is left out")
        for kib in SEGMENTS:
            throughput(kib, rounds, lines)
        handoffs(lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""Throughput of the wire, slab to slab between two processes over TCP loopback, CRC checked, against a
plain socket in the same run over as much memory. Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO."""
import mmap
import os
import socket
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
from wire_peers import Peer  # noqa: E402

SPAN, FLOWS, TOKENS, SEG, LAYERS = 128 << 20, 16, 4096, 65536, 8
TOTAL = SPAN * FLOWS


def plain_socket(size):
    """GB/s of send/recv_into of `size` bytes over SPAN bytes on both sides; no checks."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        s = socket.create_connection(listener.getsockname())
        buf = memoryview(mmap.mmap(-1, SPAN))
        for i in range(0, SPAN, 4096):
            buf[i] = 1
        s.recv(1)
        for at in range(0, TOTAL, size):
            s.sendall(buf[at % SPAN:at % SPAN + size])
        s.close()
        os._exit(0)
    conn, _ = listener.accept()
    buf = memoryview(mmap.mmap(-1, SPAN))
    for i in range(0, SPAN, 4096):
        buf[i] = 1
    conn.sendall(b"x")
    start, got = time.monotonic(), 0
    while got < TOTAL:
        n = conn.recv_into(buf[got % SPAN:], min(size, SPAN - got % SPAN), socket.MSG_WAITALL)
        if n == 0:
            break
        got += n
    seconds = time.monotonic() - start
    conn.close()
    os.waitpid(pid, 0)
    return got / seconds / 1e9


def main():
    opts = dict(seg=SEG, layers=LAYERS, slots=560)
    a, b = Peer("a", **opts), Peer("b", **opts)
    lines = []
    try:
        for item in (64, 256, 1024):
            chunk = item * 1024 // SEG * 16
            a.ask(f"auto {TOKENS} {chunk} 9", "auto")
            warm = f"storm a {a.addr} {a.inc} 1 2 {TOKENS} {chunk} 9 1"
            b.ask(warm, "storm done=2 failed=0", 60)
            u = a.usage()["cpu_s"], b.usage()["cpu_s"]
            m = b.ask(f"storm a {a.addr} {a.inc} 10 {FLOWS} {TOKENS} {chunk} 9 0",
                      rf"storm done={FLOWS} failed=0 bytes=(\d+) seconds=(\S+)", 120)
            cpu = a.usage()["cpu_s"] - u[0], b.usage()["cpu_s"] - u[1]
            rate, raw = int(m[1]) / float(m[2]) / 1e9, plain_socket(item * 1024)
            print(f"item {item} KiB: {rate:.2f} GB/s, CPU s per 8 GB: sender "
                  f"{cpu[0] * 8e9 / int(m[1]):.2f} receiver {cpu[1] * 8e9 / int(m[1]):.2f}; plain "
                  f"socket {raw:.2f} GB/s")
            lines.append(f"bench,wire_{item}k,{rate:.2f},GB/s,plain socket {raw:.2f},"
                         f"{rate / raw:.2f}")
    finally:
        a.stop()
        b.stop()
    print("\n".join(lines))


if __name__ == "__main__":
    main()

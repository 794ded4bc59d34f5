#!/usr/bin/python3
"""The SSD tier's speed, durable and checked, beside fio (io_uring, direct, the same block size and depth) and
RocksDB's blob files, in turns on the same disk. fio writes a preallocated file of its own and reads the blocks that
the tier wrote, from the tier's file, each before and after the other: where on the disk they lie makes a difference.
The best and the median of the rounds; ratios are of the medians. Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO.

    tests/bench/ssd.py [ROUNDS]      BENCH_SSD_DIR: a folder on the disk to measure (/var/tmp)
"""
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOLS = os.path.join(ROOT, os.environ.get("BUILD", "build"), "tests", "tools")
DEPTH = 16
SIZES = ((256, 4096), (1024, 1024), (8192, 128))


def tool(name, folder, *args):
    """What it printed: {what: (GB/s, CPU s/GB)}, and the other lines."""
    out = subprocess.run([os.path.join(TOOLS, name), os.path.join(folder, name), *args], check=True,
                         stdout=subprocess.PIPE, text=True).stdout
    rows = dict(line.split(" ", 1) for line in out.splitlines())
    rates = {k: tuple(map(float, rows.pop(k).split())) for k in ("write", "read", "crc") if k in rows}
    return rates, rows


def tier(folder, kib, blocks, *args):
    """Twice as many slots in memory as fio has buffers: a block that is checked gives none back to the disk yet."""
    rates, rows = tool("ssd_bench", folder, f"block_kib={kib}", f"blocks={blocks}", f"depth={DEPTH}",
                       f"slots={2 * DEPTH}", *args)
    assert rows["failed"] == "0 crc_errors 0", rows
    return rates, rows["engine"]


def fio(rw, path, kib, blocks, *args):
    """A write is ended by an fsync."""
    out = subprocess.run(
        ["fio", "--name=x", f"--filename={path}", "--ioengine=io_uring", "--direct=1", f"--rw={rw}", f"--bs={kib}k",
         f"--size={kib * blocks}k", f"--iodepth={DEPTH}", "--output-format=json", *args], check=True,
        stdout=subprocess.PIPE, text=True).stdout
    job = json.loads(out)["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return {rw: (job[rw]["bw_bytes"] / 1e9, cpu / (job[rw]["io_bytes"] / 1e9))}


def measure(r, folder, kib, blocks, has_fio):
    """One round: what each gave goes into r. The tier's engine."""
    own, file = os.path.join(folder, "fio"), os.path.join(folder, "ssd_bench", "blocks")
    rates, engine = tier(folder, kib, blocks)
    r.add("tier", rates)
    for _ in range(2 if has_fio else 0):
        r.add("fio", fio("read", file, kib, blocks, "--readonly", "--offset=1m"))  # slot 0 lies there
    r.add("tier", tier(folder, kib, blocks, "write=0")[0])
    shutil.rmtree(os.path.join(folder, "ssd_bench"))
    if has_fio:
        r.add("fio", fio("write", own, kib, blocks, "--fallocate=native", "--end_fsync=1"))
        os.unlink(own)
    r.add("blob", tool("blob_bench", folder, f"block_kib={kib}", f"blocks={blocks}")[0])
    shutil.rmtree(os.path.join(folder, "blob_bench"))
    return engine


class Rows:
    def __init__(self):
        self.got = {}

    def add(self, who, rates):
        for what, (rate, cpu) in rates.items():
            self.got.setdefault((who, what), []).append((rate, cpu))

    def best(self, who, what):
        return max((x[0] for x in self.got.get((who, what), [])), default=0)

    def median(self, who, what):
        return statistics.median(x[0] for x in self.got[who, what])

    def cpu(self, who, what):
        return min((x[1] for x in self.got.get((who, what), [])), default=0)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    has_fio, lines = shutil.which("fio") is not None, []
    if not has_fio:
        print("no fio here: its columns stay empty")
    folder = tempfile.mkdtemp(prefix="baton-bench-", dir=os.environ.get("BENCH_SSD_DIR", "/var/tmp"))
    try:
        for kib, blocks in SIZES:
            r = Rows()
            for _ in range(rounds):
                engine = measure(r, folder, kib, blocks, has_fio)
            print(f"{kib} KiB, {engine}, {rounds} rounds; best (median) GB/s, least CPU s/GB; the CRC alone "
                  f"{r.cpu('tier', 'crc'):.3f} CPU s/GB")
            for rw in "write", "read":
                for who in "tier", "fio", "blob":
                    if (who, rw) in r.got:
                        print(f"  {rw:5} {who:4} {r.best(who, rw):.2f} ({r.median(who, rw):.2f}), {r.cpu(who, rw):.3f}")
                rate, raw = r.median("tier", rw), r.median("fio", rw) if has_fio else 0
                against = (f"fio {raw:.2f}", f"{rate / raw:.2f}") if raw else ("-", "-")
                lines.append(f"bench,ssd_{rw}_{kib}k,{rate:.2f},GB/s,{against[0]},{against[1]}")
                cpu, other = r.cpu("tier", rw), r.cpu("fio", rw)
                parts = f"fio {other:.3f} and CRC {r.cpu('tier', 'crc'):.3f}" if raw else "-"
                ratio = f"{cpu / (other + r.cpu('tier', 'crc')):.2f}" if raw else "-"
                lines.append(f"bench,ssd_{rw}_{kib}k_cpu,{cpu:.3f},CPU s/GB,{parts},{ratio}")
                blob = r.median("blob", rw)
                lines.append(f"bench,ssd_{rw}_{kib}k_blob,{blob:.2f},GB/s,the tier {rate:.2f},{blob / rate:.2f}")
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())

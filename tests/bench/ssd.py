#!/usr/bin/python3
"""The SSD tier's speed, durable and checked, beside fio (io_uring, direct, the same block size and depth, a
preallocated file) and RocksDB's blob files, in turns on the same disk. The best and the median of the rounds;
ratios are of the bests. Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO.

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
    shutil.rmtree(os.path.join(folder, name))
    rows = dict(line.split(" ", 1) for line in out.splitlines())
    rates = {k: tuple(map(float, rows.pop(k).split())) for k in ("write", "read", "crc") if k in rows}
    return rates, rows


def tier(folder, kib, blocks):
    rates, rows = tool("ssd_bench", folder, f"block_kib={kib}", f"blocks={blocks}", f"depth={DEPTH}")
    assert rows["failed"] == "0 crc_errors 0", rows
    return rates, rows["engine"]


def fio(folder, kib, blocks):
    """Write (ended by an fsync) and read over one file."""
    path, rates = os.path.join(folder, "fio"), {}
    for rw in ("write", "read"):
        out = subprocess.run(
            ["fio", "--name=x", f"--filename={path}", "--ioengine=io_uring", "--direct=1", f"--rw={rw}",
             f"--bs={kib}k", f"--size={kib * blocks}k", f"--iodepth={DEPTH}", "--fallocate=native",
             "--end_fsync=1", "--output-format=json"], check=True, stdout=subprocess.PIPE, text=True).stdout
        job = json.loads(out)["jobs"][0]
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        rates[rw] = job[rw]["bw_bytes"] / 1e9, cpu / (job[rw]["io_bytes"] / 1e9)
    os.unlink(path)
    return rates


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
                rates, engine = tier(folder, kib, blocks)
                r.add("tier", rates)
                if has_fio:
                    r.add("fio", fio(folder, kib, blocks))
                r.add("blob", tool("blob_bench", folder, f"block_kib={kib}", f"blocks={blocks}")[0])
            print(f"{kib} KiB, {engine}, {rounds} rounds; best (median) GB/s, least CPU s/GB; the CRC alone "
                  f"{r.cpu('tier', 'crc'):.3f} CPU s/GB")
            for rw in "write", "read":
                for who in "tier", "fio", "blob":
                    if (who, rw) in r.got:
                        print(f"  {rw:5} {who:4} {r.best(who, rw):.2f} ({r.median(who, rw):.2f}), {r.cpu(who, rw):.3f}")
                best, raw = r.best("tier", rw), r.best("fio", rw)
                against = (f"fio {raw:.2f}", f"{best / raw:.2f}") if raw else ("-", "-")
                lines.append(f"bench,ssd_{rw}_{kib}k,{best:.2f},GB/s,{against[0]},{against[1]}")
                cpu, other = r.cpu("tier", rw), r.cpu("fio", rw)
                parts = f"fio {other:.3f} and CRC {r.cpu('tier', 'crc'):.3f}" if raw else "-"
                ratio = f"{cpu / (other + r.cpu('tier', 'crc')):.2f}" if raw else "-"
                lines.append(f"bench,ssd_{rw}_{kib}k_cpu,{cpu:.3f},CPU s/GB,{parts},{ratio}")
                blob = r.best("blob", rw)
                lines.append(f"bench,ssd_{rw}_{kib}k_blob,{blob:.2f},GB/s,the tier {best:.2f},{blob / best:.2f}")
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())

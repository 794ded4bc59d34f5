#!/usr/bin/python3
"""The SSD tier's speed, durable and checked, beside fio (io_uring, direct, the same block size and depth, a
preallocated file) in the same run on the same disk. Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO.
BENCH_SSD_DIR: a folder on the disk to measure (/var/tmp)."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOL = os.path.join(ROOT, os.environ.get("BUILD", "build"), "tests", "tools", "ssd_bench")
DEPTH = 16


def tier(folder, kib, blocks):
    out = subprocess.run([TOOL, os.path.join(folder, "tier"), f"block_kib={kib}", f"blocks={blocks}",
                          f"depth={DEPTH}"], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = dict(line.split(" ", 1) for line in out.splitlines())
    assert rows["failed"] == "0 crc_errors 0", out
    shutil.rmtree(os.path.join(folder, "tier"))
    return rows["engine"], {k: [float(x) for x in rows[k].split()] for k in ("write", "read")}


def fio(folder, kib, blocks):
    """GB/s of write (ended by an fsync) and read over one file."""
    if shutil.which("fio") is None:
        return None
    path, rates = os.path.join(folder, "fio"), {}
    for rw in ("write", "read"):
        out = subprocess.run(
            ["fio", "--name=x", f"--filename={path}", "--ioengine=io_uring", "--direct=1", f"--rw={rw}",
             f"--bs={kib}k", f"--size={kib * blocks}k", f"--iodepth={DEPTH}", "--fallocate=native",
             "--end_fsync=1", "--output-format=json"], check=True, stdout=subprocess.PIPE, text=True).stdout
        rates[rw] = json.loads(out)["jobs"][0][rw]["bw_bytes"] / 1e9
    os.unlink(path)
    return rates


def main():
    lines = []
    folder = tempfile.mkdtemp(prefix="baton-bench-", dir=os.environ.get("BENCH_SSD_DIR", "/var/tmp"))
    try:
        for kib, blocks in ((256, 4096), (1024, 1024), (8192, 128)):
            best, raw = {}, {}
            for _ in range(3):
                engine, got = tier(folder, kib, blocks)
                other = fio(folder, kib, blocks)
                for rw, (rate, cpu) in got.items():
                    if rate > best.get(rw, (0, 0))[0]:
                        best[rw] = rate, cpu
                    if other:
                        raw[rw] = max(raw.get(rw, 0), other[rw])
            for rw, (rate, cpu) in best.items():
                print(f"{kib} KiB {rw}: {rate:.2f} GB/s, {cpu:.3f} CPU s/GB with {engine}; "
                      f"fio {raw.get(rw, 0):.2f} GB/s")
                against = f"fio {raw[rw]:.2f}" if raw else "-"
                ratio = f"{rate / raw[rw]:.2f}" if raw else "-"
                lines.append(f"bench,ssd_{rw}_{kib}k,{rate:.2f},GB/s,{against},{ratio}")
                lines.append(f"bench,ssd_{rw}_{kib}k_cpu,{cpu:.3f},CPU s/GB,-,-")
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())

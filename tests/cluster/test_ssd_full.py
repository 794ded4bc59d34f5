"""A disk that is full when the kvstore starts, or gets full under it: serving goes on, it is said once
what to do, and the disk is used when there is room."""
import os
import subprocess
import tempfile

import pytest

from kvstore_nodes import BLOCK, Nodes, keys
from test_ssd_path import N, settle, write


@pytest.fixture
def disk():
    """A folder on a file system of its own, with less room than RocksDB would like to reserve."""
    folder = tempfile.mkdtemp(prefix="baton-disk-")
    p = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m,mode=0700", "tmpfs", folder],
                       stderr=subprocess.PIPE, text=True)
    if p.returncode != 0:
        os.rmdir(folder)
        pytest.skip(f"no file system may be mounted here: {p.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)
    os.rmdir(folder)


@pytest.fixture
def nodes(disk):  # ends before the disk is unmounted
    n = Nodes()
    yield n
    n.end()


def start(nodes, disk, size="8MiB"):
    return nodes.kvstore("n1", slab="320KiB", kvstore__ssd__path=os.path.join(disk, "ssd"),
                         kvstore__ssd__bytes=size, kvstore__ssd__write_policy="always",
                         kvstore__ssd__probe_ms="50ms")


def fill_up(disk):
    """Takes what is left."""
    name = os.path.join(disk, "others")
    fd = os.open(name, os.O_WRONLY | os.O_CREAT)
    for size in (65536, 4096):
        try:
            while os.write(fd, bytes(size)) == size:
                pass
        except OSError:
            pass
    os.close(fd)
    return name


def prompts(kv, c, p, first, n=4):
    for i in range(first, first + n):
        write(c, p, 1000 + i, keys(i % 200 + 1, N), N * BLOCK + 3, seed=i % 200 + 1)
        kv.wait_metric("baton_ssd_backlog", 0)


def until_up(kv, c, p, first):
    """Serving all the while."""
    for i in range(200):
        if kv.metrics()["baton_ssd_up"] == 1:
            return
        prompts(kv, c, p, first + i, 1)
    raise AssertionError(f"the disk is not used again\n{kv.log()[-3000:]}")


def comes_back(kv, c, p, first):
    """A prompt that the slab has lost is read from the disk."""
    k, end = keys(first % 200 + 1, N), first + 40
    for i in range(first, end, 8):
        write(c, p, 5000 + i, k, N * BLOCK + 3, seed=first % 200 + 1)
        settle(kv)
        prompts(kv, c, p, i + 1, 7)
        if write(c, p, 6000 + i, k, N * BLOCK + 3, seed=first % 200 + 1) == N:
            break
    else:
        raise AssertionError(kv.metrics())
    assert kv.metrics()['baton_kvstore_ssd_loads_total{result="ok"}'] > 0


def test_full_at_start(nodes, disk):
    others = fill_up(disk)
    kv = start(nodes, disk)
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    prompts(kv, c, p, 0)
    assert kv.metrics()["baton_ssd_up"] == 0
    assert kv.log().count("ev=ssd_unused") == 1 and "Free space on that disk" in kv.log()
    os.unlink(others)
    kv.wait_log("ev=ssd_open")
    until_up(kv, c, p, 10)
    comes_back(kv, c, p, 20)
    assert kv.log().count("ev=ssd_unused") == 1


def test_full_while_running(nodes, disk):
    kv = start(nodes, disk)
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    prompts(kv, c, p, 0)
    others, at = fill_up(disk), 10
    while kv.metrics()["baton_ssd_up"] == 1:  # the index grows with every block
        prompts(kv, c, p, at, 4)
        at += 4
        assert at < 4000, "the index needs no room?"
    prompts(kv, c, p, at)
    # Each change is told once: the index may find room for a moment and lose it again.
    assert kv.log().count("ev=ssd_down") == kv.log().count("ev=ssd_up") + 1 and "No space left" in kv.log()
    os.unlink(others)
    until_up(kv, c, p, at + 10)
    comes_back(kv, c, p, at + 300)
    assert kv.log().count("ev=ssd_up") == kv.log().count("ev=ssd_down")


def test_smaller_than_configured(nodes, disk):
    """The slab file takes what the disk has, but leaves the index its room; another start finds both."""
    kv = start(nodes, disk, "64MiB")
    c, p = nodes.conductor(kv), nodes.worker(kv, "p")
    m = kv.metrics()
    assert m["baton_ssd_up"] == 1 and "ev=ssd_smaller" in kv.log()
    assert 0.5 * 11 * 2**20 < m["baton_ssd_slots"] * 8192 < 0.9 * 11 * 2**20
    prompts(kv, c, p, 0)
    comes_back(kv, c, p, 20)
    slots = m["baton_ssd_slots"]
    c.close()
    p.stop()
    kv.stop()
    kv = start(nodes, disk, "64MiB")
    m = kv.metrics()
    assert m["baton_ssd_up"] == 1 and m["baton_ssd_slots"] >= slots
    assert m["baton_ssd_blocks"] > 0

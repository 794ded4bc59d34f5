"""What goes wrong around a kvstore in an operator's hands: its files removed or given twice, the daemon stopped and woken.
Serving goes on, or the refusal names the key and what to do."""
import os
import re
import shutil
import signal
import time

import grpc
import pytest

from crash_rounds import compute, key
from kvstore_nodes import BLOCK, PATIENCE, Nodes, Worker

PROMPT = 8  # blocks


@pytest.fixture
def nodes():
    n = Nodes()
    yield n
    n.end()


def serve(c, w, chain):
    """A prompt of its own, written and compared; the blocks of it that were there."""
    status, resident = compute(c, w, chain, [key(chain, b) for b in range(PROMPT)], PROMPT * BLOCK + 3, chain % 250)
    assert status == 0
    return resident


def refused(nodes, node, code, *words, **options):
    kv = nodes.kvstore(node, slab="8MiB", expect_ready=False, **options)
    assert kv.p.wait(60 * PATIENCE) == code
    assert all(x in kv.log() for x in words), kv.log()[-2000:]


def test_ssd_removed(nodes):
    """The folder goes while it is used: told once, used all the same, made anew by the next start."""
    folder = os.path.join(nodes.folder, "ssd")
    options = dict(slab="8MiB", kvstore__ssd__path=folder, kvstore__ssd__bytes="16MiB", kvstore__ssd__write_policy="always")
    kv = nodes.kvstore("n1", **options)
    w, c = nodes.add(Worker(kv, "w")), nodes.conductor(kv)
    serve(c, w, 1)
    shutil.rmtree(folder)
    kv.wait_log("ev=ssd_removed")
    for chain in range(2, 40):
        serve(c, w, chain)
    assert kv.log().count("ev=ssd_removed") == 1 and "level=error" not in kv.log()
    os.unlink(kv.slab)  # the slab's name as well: workers have it by its descriptor
    serve(c, w, 40)
    kv.stop(signal.SIGKILL)
    nodes.made.remove(kv)
    kv = nodes.kvstore("n1", **options)
    w.wait("attached")
    c = nodes.conductor(kv)
    assert serve(c, w, 1) == 0
    kv.wait_metric("baton_ssd_blocks", PROMPT)


def test_given_twice(nodes):
    """Nothing of the one that runs is touched by another that is given its name, slab or SSD."""
    folder, slab = os.path.join(nodes.folder, "ssd"), f"/dev/shm/baton-odd-{os.getpid()}"
    kv = nodes.kvstore("n1", slab="8MiB", kvstore__slab_path=slab, kvstore__ssd__path=folder, kvstore__ssd__bytes="16MiB")
    w, c = nodes.add(Worker(kv, "w")), nodes.conductor(kv)
    serve(c, w, 1)
    refused(nodes, "n2", 1, "belongs to another running kvstore", kvstore__slab_path=slab)
    refused(nodes, "n3", 1, "kvstore.ssd.path", "in use by another kvstore", kvstore__ssd__path=folder, kvstore__ssd__bytes="16MiB")
    refused(nodes, "n1", 3, "another live kvstore is called kvstore-n1", run_dir=os.path.join(nodes.folder, "other"))
    assert serve(c, w, 2) == 0 and kv.p.poll() is None


def test_stopped_and_woken(nodes):
    """SIGSTOP until its lease is gone; it comes back by itself, with its blocks."""
    kv = nodes.kvstore("n1", slab="8MiB")
    w, c = nodes.add(Worker(kv, "w")), nodes.conductor(kv)
    serve(c, w, 1)
    member, end = f"/baton/t{os.getpid()}/members/kvstore/{kv.name}", time.monotonic() + 60 * PATIENCE
    assert nodes.etcd.has(member)
    kv.p.send_signal(signal.SIGSTOP)
    while nodes.etcd.has(member):
        assert time.monotonic() < end
        time.sleep(0.1)
    kv.p.send_signal(signal.SIGCONT)
    kv.wait_log("ev=rejoined")
    c = nodes.conductor(kv)
    keys = [key(1, b) for b in range(PROMPT)]
    assert compute(c, w, 2, keys, PROMPT * BLOCK + 3, 1) == (0, PROMPT)
    kv.wait_quiet()


def test_called_while_it_stops(nodes):
    """etcd hangs, so the kvstore waits with its goodbye; a conductor that dials it meanwhile is told that it is gone."""
    kv = nodes.kvstore("n1", slab="8MiB")
    kv.wait_log("ev=ready")
    nodes.etcd.p.send_signal(signal.SIGSTOP)
    try:
        kv.p.send_signal(signal.SIGTERM)
        kv.wait_log("ev=stopping")
        late = [nodes.conductor(kv, hello=False) for _ in range(4)]
        assert kv.p.wait(60 * PATIENCE) == 0, kv.log()[-3000:]
    finally:
        nodes.etcd.p.send_signal(signal.SIGCONT)
    assert all(c.wait_end()[0] == grpc.StatusCode.UNAVAILABLE for c in late)
    assert "ev=session_" not in kv.log()


def test_slab_cut(nodes):
    """Somebody cuts the slab's file: whoever touches what is gone dies with a line that says so; the next kvstore makes a new slab."""
    kv = nodes.kvstore("n1", slab="8MiB")
    w, c = nodes.add(Worker(kv, "w")), nodes.conductor(kv)
    serve(c, w, 1)
    assert c.reserve(2, [key(2, b) for b in range(PROMPT)], PROMPT * BLOCK).status == 0
    assert w.open(2, "w")[0] == "OK"
    os.truncate(kv.slab, 0)
    w.say("fill 2 1 2")
    assert w.p.wait(60 * PATIENCE) == -signal.SIGBUS
    assert kv.p.wait(60 * PATIENCE) == -signal.SIGBUS  # it frees the slots of the worker that died
    w.err.seek(0)
    for log in kv.log(), w.err.read():
        said = re.findall("level=error .* ev=slab_cut .*", log)
        assert len(said) == 1 and kv.slab in said[0] and "start this daemon again" in said[0], log[-2000:]
    kv = nodes.kvstore("n1", slab="8MiB")
    w, c = nodes.add(Worker(kv, "w", 2)), nodes.conductor(kv)
    assert serve(c, w, 3) == 0
    kv.wait_quiet()


def test_slab_replaced(nodes):
    """Somebody puts a file of his own where the slab's was: a stopped kvstore says so and leaves it."""
    kv = nodes.kvstore("n1", slab="8MiB")
    w, c = nodes.add(Worker(kv, "w")), nodes.conductor(kv)
    os.unlink(kv.slab)
    with open(kv.slab, "x") as f:
        f.write("mine")
    try:
        serve(c, w, 1)
        assert kv.stop() == 0
        with open(kv.slab) as f:
            assert f.read() == "mine"
    finally:
        os.unlink(kv.slab)
    kv.wait_log("level=warn .* ev=slab_left path=" + kv.slab)

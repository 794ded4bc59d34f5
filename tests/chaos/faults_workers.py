"""Faults of prefill and decode workers: killed, stopped, slowed down, drained, not able to start."""
import os
import re
import signal
import socket
import subprocess
import time

from cluster import NODES, PATIENCE, ROOT, wait_for
from fault import Background, a_worker, fault, restart, shape_of, slow, stop
from load import Broken, Case, Lost, Refused


@fault([1, 11], "decode")
def decode_killed(x):
    d = a_worker(x, "decode")
    x.note(d.name)
    d.kill()
    restart(x, d)


def long_request(x, conductor, tokens):
    """One that runs for long, told from others by its prompt's length."""
    n = 300 + x.rng.randrange(100)
    ids = [300 + x.rng.randrange(1000) for _ in range(n)]
    case = Case("long of its own", "/v1/completions", {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
    b = Background(x, conductor, case)
    b.prompt_tokens = n
    return b


@fault([2, 46], "decode prefill")
def two_decodes_under_one_request(x):
    """Its second worker dies as well: one error event, within 10 s, and no third worker."""
    conductor = x.cluster.a
    b = long_request(x, conductor, 7000)
    killed = []
    try:
        for i in range(2):
            seen = {}  # (worker, epoch): tokens when it was first seen

            def placed():
                """The prefill worker sends a plan's first token, so the second that is new shows that the decode worker
                has the request. A worker that had not taken it yet does not count as killed by it."""
                r = shape_of(x, conductor, b)
                if not r or r["state"] != "decoding" or r["decode"] in [k.name for k in killed] + ["-", None]:
                    return None
                first = seen.setdefault((r["decode"], r["epoch"]), r["tokens"])
                return r if r["tokens"] >= first + 2 else None
            try:
                r = wait_for(lambda: not b.is_alive() or placed(), 30, "the request decodes")
            except AssertionError:
                raise AssertionError(f"request {i}: {shape_of(x, conductor, b)}, {b.result!r}") from None
            if not b.is_alive():
                return x.note(f"over before the kill: {b.result!r}"[:200])
            killed.append(x.cluster.named(r["decode"]))
            x.note(killed[-1].name)
            killed[-1].kill()
        at = time.monotonic()
        got = b.wait(15)
        if isinstance(got, Lost):
            if time.monotonic() - at > 10 * PATIENCE + x.load.slack():
                raise AssertionError(f"the error came {time.monotonic() - at:.1f} s after the second kill")
        elif not (isinstance(got, (Refused, Broken)) and not getattr(got, "began", True)):
            raise AssertionError(f"two workers of a request were killed, and it got {got!r}")
    finally:
        for d in killed:
            d.start_again()


@fault([3], "decode")
def decode_stopped(x):
    stop(x, a_worker(x, "decode"))


@fault([10], "prefill")
def prefill_stopped(x):
    """Also in the middle of a transfer: prompts are long enough that one is under way most of the time."""
    stop(x, a_worker(x, "prefill"))


@fault([4], "decode prefill")
def worker_drained_by_sigterm(x):
    """It finishes what it has, or it is planned elsewhere, and ends with status 0."""
    d = a_worker(x, x.rng.choice(["decode", "prefill"]))
    x.note(d.name)
    d.planned = True
    d.signal(signal.SIGTERM)
    wait_for(lambda: (d.child is None or d.child.poll() is None or True) and not d.alive(), 35, f"{d.name} ends after SIGTERM")
    if d.child is not None and d.child.wait() != 0:
        raise AssertionError(f"{d.name} ended with {d.child.returncode} at SIGTERM")
    restart(x, d)


@fault([4], "decode prefill etcd")
def node_drained(x):
    node = x.rng.choice(NODES[1:])
    x.note(node)
    x.cluster.ctl_json("drain", node)
    try:
        time.sleep(x.rng.uniform(2, 6))
    finally:
        wait_for(lambda: x.cluster.ctl("undrain", node).returncode == 0, 20, "the node is used again")


@fault([5], "decode")
def decode_slow(x):
    slow(x, a_worker(x, "decode"))


@fault([5], "prefill")
def prefill_slow(x):
    slow(x, a_worker(x, "prefill"))


@fault([6], "decode")
def decode_killed_under_derived_state(x):
    """With two choices, a stop string of which a part is held back, characters in several tokens, penalties."""
    names = ["n", "stop string", "split characters", "penalties", "several prompts"]
    cases = [next(c for c in x.load.cases if c.name == n) for n in names]
    requests = [Background(x, x.rng.choice(x.cluster.conductors()), c) for c in cases * 2]
    wait_for(lambda: any(b.tokens > 10 or not b.is_alive() for b in requests), 30, "one of them runs")
    d = a_worker(x, "decode")
    x.note(d.name)
    d.kill()
    restart(x, d)
    for b in requests:
        b.must_equal()


@fault([7, 8], "prefill")
def prefill_killed(x):
    """While it computes: its prompts are planned again, what it had half written is never used."""
    d = a_worker(x, "prefill")
    cases = [c for c in x.load.cases if c.name in ("long prompt", "echo", "echo of a long prompt")]
    requests = [Background(x, x.rng.choice(x.cluster.conductors()), x.rng.choice(cases), stream=x.rng.random() < 0.5,
                           salt=f"fresh {x.rng.random()}") for _ in range(4)]
    time.sleep(x.rng.uniform(0.02, 0.5))
    x.note(d.name)
    d.kill()
    restart(x, d)
    for b in requests:
        b.must_equal()


@fault([46], "prefill decode")
def query_of_death(x):
    """A prompt that kills whoever computes it: 500 after two workers, and never a third."""
    n = 4000 + x.rng.randrange(2000)
    ids = [300 + x.rng.randrange(1500) for _ in range(n)]
    b = Background(x, x.cluster.b, Case("query of death", "/v1/completions", {"prompt": ids, "max_tokens": 4, "echo": True, "logprobs": 3}))
    b.prompt_tokens = n
    killed, req = [], None
    try:
        while b.is_alive() and len(killed) < 4:
            r = shape_of(x, x.cluster.b, b)
            name = r and r["state"] == "prefilling" and r["prefill"]
            if name and name != "-" and name not in [k.name for k in killed]:
                req = r["req"]
                killed.append(x.cluster.named(name))
                killed[-1].kill()
                x.note(name)
        if len(killed) > 1:
            killed[0].start_again()  # as its service manager would: others' prompts wait for a prefill worker
        got = b.wait(20)
        # A worker that had not taken it yet is not counted. The conductor's log says after each loss how many were:
        # with the second, it ends.
        deaths = [int(n) for n in re.findall(rf"ev=request_replan req={req} .*?deaths=(\d+)", x.cluster.b.daemon.text())]
        if sum(n > 1 for n in deaths) > 1 or len(killed) > 3 or len(killed) > 1 and isinstance(got, Exception) and \
                not isinstance(got, (Lost, Refused)):
            raise AssertionError(f"{[k.name for k in killed]} were killed, deaths counted after each loss: {deaths}, and it got {got!r}"[:600])
    finally:
        for d in killed:
            if not d.alive():
                d.start_again()


@fault([42], "other")
def crash_loop(x):
    """A worker with a damaged model ends by itself with a message that names the file, every time."""
    folder = os.path.join(x.cluster.folder, "bad-model")
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(os.path.join(ROOT, "deploy/models/shakespeare-llama-6m")):
        with open(os.path.join(ROOT, "deploy/models/shakespeare-llama-6m", name), "rb") as f:
            data = f.read()
        with open(os.path.join(folder, name), "wb") as f:
            f.write(data[:x.rng.randrange(len(data) // 2)] if name == "model.safetensors" else data)
    d = a_worker(x, "decode")
    within = x.net.machines[d.node].within if x.net else []
    for _ in range(2):
        p = subprocess.run([*within, *d.argv, "--set", "worker.index=9", "--set", f"model.path={folder}"], env=d.env, cwd="/",
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60 * PATIENCE)
        if p.returncode <= 0 or b"model.safetensors" not in p.stdout:
            raise AssertionError(f"a damaged model: ended with {p.returncode}: {p.stdout[-800:].decode(errors='replace')}")


@fault([47], "decode prefill")
def log_and_metrics_that_nobody_reads(x):
    """A worker whose log goes to a pipe that nobody reads, and scrapers that stop reading: nobody waits for them."""
    scrapers = []
    for d in x.cluster.kind("kvstore", "prefill", "decode"):
        s = socket.create_connection(d.address())
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        scrapers.append(s)
    d = a_worker(x, "decode")
    x.note(d.name)
    d.kill()
    r, w = os.pipe()
    within = x.cluster.net.machines[d.node].within if x.cluster.net else []
    d.child = subprocess.Popen([*within, *d.argv, "--set", "log.level=debug"], env=d.env, cwd="/", stdin=subprocess.DEVNULL,
                               stdout=w, stderr=w)
    os.close(w)
    d.pid = d.child.pid
    try:
        wait_for(lambda: x.cluster.ctl_json("nodes") and
                 any(m["pid"] == d.pid and m["session_up"] for m in x.cluster.ctl_json("nodes")), 30, "it serves without a log")
        time.sleep(3)
    finally:
        d.child.kill()
        d.child.wait()
        d.lost()
        os.close(r)
        for s in scrapers:
            s.close()
        d.start_again()

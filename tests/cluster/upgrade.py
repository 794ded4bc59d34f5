#!/usr/bin/python3
"""make check-upgrade: a cluster of the previous release is upgraded daemon by daemon under load, and back.

usage: upgrade.py PREVIOUS_BIN   (BUILD/bin has the new programs)

Two nodes with a prefill and a decode worker each. Clients reach two conductors through a balancer that sends new
connections only to those whose /health says 200. Six clients stream one long answer after the other, and twenty short
requests a second come beside them, whether or not earlier ones have ended. Every answer must be the one that the old
cluster gave, to the last token, whichever of the two releases its daemons have; no request may fail, and no connection
may be refused. Workers first, then kvstores, then the conductors, as docs/UPGRADING.md says; then one worker of each
kind goes back to the previous release."""
import asyncio
import concurrent.futures
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time

from conftest import BUILD, wait_for
from restarts import Restarts
from sanitizer import PATIENCE
from test_conductors import Conductor
from test_pins import start_conductor_again

NEW = os.path.join(BUILD, "bin")
STREAMS, RATE, GRACE_MS = 6, 20, 3000
LONG = ["ROMEO:\n", "JULIET:\nO gentle", "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 12]
SHORT = ["Once more", "What light", "My lord,\n", "To the king"]


class Behind(Conductor):
    """A conductor behind the balancer: of the release in `folder`, at the same port after every start."""

    def __init__(self, c, name, folder):
        self.folder = folder
        super().__init__(c, name, GRACE_MS)

    def start(self):
        self.p = subprocess.Popen([os.path.join(self.folder, "baton-conductor"), "--config", self.conf],
                                  stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def change(self, folder):
        self.p.terminate()
        status = self.p.wait(90 * PATIENCE)
        assert status == 0, f"the conductor at {self.port} ended with {status}"
        self.folder = folder
        self.start()
        wait_for(self.serving, 30, "the next conductor serves")


class Balancer:
    """Passes connections on, in turns, to the ports whose /health said 200 a moment ago. It never tries a second port
    for a connection: what a conductor refuses is counted and reaches the client."""

    def __init__(self, ports):
        self.ports, self.good, self.turn = ports, [], 0
        self.passed, self.refused, self.nobody = dict.fromkeys(ports, 0), 0, 0
        self.loop, self.port = asyncio.new_event_loop(), None
        threading.Thread(target=self.run, daemon=True).start()
        wait_for(lambda: self.port and len(self.good) == len(ports), 30, "the balancer knows its conductors")

    def run(self):
        self.loop.run_until_complete(self.main())

    async def main(self):
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=256)
        self.port = server.sockets[0].getsockname()[1]
        while True:
            said = await asyncio.gather(*(self.healthy(p) for p in self.ports))
            self.good = [p for p, good in zip(self.ports, said) if good]
            await asyncio.sleep(0.2)

    async def healthy(self, port):
        try:
            r, w = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 1)
        except (OSError, asyncio.TimeoutError):
            return False
        try:
            w.write(b"GET /health HTTP/1.1\r\nHost: balancer\r\nConnection: close\r\n\r\n")
            return (await asyncio.wait_for(r.readline(), 1)).startswith(b"HTTP/1.1 200 ")
        except (OSError, asyncio.TimeoutError):
            return False
        finally:
            w.close()

    async def connection(self, reader, writer):
        if not self.good:
            self.nobody += 1
            writer.close()
            return
        self.turn += 1
        port = self.good[self.turn % len(self.good)]
        try:
            r, w = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            self.refused += 1
            writer.close()
            return
        self.passed[port] += 1
        await asyncio.gather(self.pump(reader, w), self.pump(r, writer))

    async def pump(self, reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other end sees a broken connection and counts it
        writer.close()


class Load:
    """Streams and short requests through the balancer, compared token by token with the first answers."""

    def __init__(self, port):
        self.port, self.ending, self.lock = port, False, threading.Lock()
        self.done = dict(streams=0, requests=0)
        self.errors, self.changed, self.slowest = [], [], 0.0
        self.expected = {p: self.long(p) for p in LONG} | {p: self.short(p) for p in SHORT}
        self.threads = [threading.Thread(target=self.stream, args=(i,)) for i in range(STREAMS)]
        self.threads.append(threading.Thread(target=self.arrive))

    def ask(self, prompt, tokens, stream):
        k = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120 * PATIENCE)
        try:
            k.request("POST", "/v1/completions", json.dumps({
                "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}),
                {"Content-Type": "application/json"})
            r = k.getresponse()
            body = r.read().decode()
        finally:
            k.close()
        if r.status != 200:
            raise OSError(f"status {r.status}: {body[:200]}")
        return body

    def long(self, prompt):
        events = [x[6:] for x in self.ask(prompt, 160, True).splitlines() if x.startswith("data: ")]
        if not events or events.pop() != "[DONE]":
            raise OSError("the stream broke")
        return "".join(json.loads(e)["choices"][0]["text"] for e in events)

    def short(self, prompt):
        return json.loads(self.ask(prompt, 4, False))["choices"][0]["text"]

    def one(self, what, get, prompt):
        begun, got, error = time.monotonic(), None, None
        try:
            got = get(prompt)
        except (OSError, ValueError, LookupError, http.client.HTTPException) as e:
            error = f"{what} after {time.monotonic() - begun:.1f} s: {e!r}"
        with self.lock:
            self.done[what] += 1
            self.slowest = max(self.slowest, time.monotonic() - begun)
            if error:
                self.errors.append(error)
            elif got != self.expected[prompt]:
                self.changed.append((what, prompt[:20], got))

    def stream(self, i):
        while not self.ending:
            self.one("streams", self.long, LONG[i % len(LONG)])
            i += 1

    def arrive(self):
        with concurrent.futures.ThreadPoolExecutor(256) as pool:
            begun, n = time.monotonic(), 0
            while not self.ending:
                pool.submit(self.one, "requests", self.short, SHORT[n % len(SHORT)])
                n += 1
                time.sleep(max(0, begun + n / RATE - time.monotonic()))

    def start(self):
        for t in self.threads:
            t.start()

    def stop(self):
        self.ending = True
        for t in self.threads:
            t.join()

    def more(self, streams=8):
        """Waits for further streams."""
        before = self.done["streams"]
        wait_for(lambda: self.done["streams"] >= before + streams, 180, "answers of the mixed cluster")


def releases(r):
    return sorted(m["version"] for m in r.members())


def change(r, m, folder):
    """Ends a member as systemd does and starts the program of `folder` in its place."""
    key = m["kind"], m["name"]
    argv, env, cwd = r.args[key]
    r.args[key] = [os.path.join(folder, os.path.basename(argv[0])), *argv[1:]], env, cwd
    os.kill(m["pid"], signal.SIGTERM)
    wait_for(lambda: not os.path.exists(f"/proc/{m['pid']}") or ended(m["pid"]), 60, f"the end of {m['name']}")
    (start_conductor_again if m["kind"] == "conductor" else type(r).start_again)(r, m)
    print(f"upgrade: {m['kind']} {m['name']} is of {folder}; the cluster has {releases(r)}", flush=True)


def ended(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[0] == "Z"


def version(folder):
    return subprocess.run([os.path.join(folder, "baton-kvstore"), "--version"], stdout=subprocess.PIPE, check=True,
                          text=True).stdout.split(" ", 1)[1].strip()


def main(old):
    print(f"upgrade: {version(old)} to {version(NEW)}", flush=True)
    r = Restarts("--nodes", "2", "--prefill", "2", "--decode", "2", bin=old)
    behind = []
    try:
        behind += [Behind(r.c, name, old) for name in ("front-a", "front-b")]
        for b in behind:
            wait_for(b.serving, 30, "a conductor serves")
        balancer = Balancer([b.port for b in behind])
        load = Load(balancer.port)
        begun = time.monotonic()
        load.start()
        for kind in ("prefill", "decode", "kvstore"):
            for m in r.members(kind):
                change(r, m, NEW)
                load.more()
        for b in behind:
            b.change(NEW)
            print(f"upgrade: a conductor behind the balancer is of {NEW}; the cluster has {releases(r)}", flush=True)
            load.more()
        # The cluster's first conductor serves batonctl only.
        change(r, next(m for m in r.members("conductor") if not m["name"].startswith("front-")), NEW)
        for kind in ("prefill", "decode"):  # back again
            change(r, r.members(kind)[0], old)
            load.more()
        load.stop()
        print(f"upgrade: {time.monotonic() - begun:.0f} s; {load.done['streams']} streams, {load.done['requests']} requests; "
              f"connections by conductor {list(balancer.passed.values())}")
        print(f"upgrade: {len(load.errors)} errors, {len(load.changed)} changed answers, {balancer.refused} refused "
              f"connections, {balancer.nobody} without a conductor; the slowest took {load.slowest:.1f} s")
        for w in (load.errors + load.changed)[:10]:
            print("upgrade: wrong:", w)
        return 1 if load.errors or load.changed or balancer.refused or balancer.nobody else 0
    finally:
        for b in behind:
            b.stop()
        r.stop()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(os.path.abspath(sys.argv[1])))

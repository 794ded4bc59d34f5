#!/usr/bin/python3
"""What a worker costs beside its engine: a real baton-decode with the null engine, 256 streams, one conductor (this
program, which counts messages without taking them apart). Once at full speed, once with a conductor that takes 400 kB
a second (20,000 tokens and some), for which generation has to wait. CPU time a token of the worker's process, by thread. Ends with
bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO."""
import os
import queue
import random
import sys
import threading
import time

import grpc

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
from worker_node import Node, Session, pack  # noqa: E402

STREAMS, PROMPT, TOKENS, SECONDS = 256, 16, 8000, 4.0
TOTAL, RUNNING = "baton_worker_generation_tokens_total", "baton_worker_requests_running"


def cpu_s(pid):
    """CPU seconds of a process by thread."""
    out = {}
    for t in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{t}/stat") as f:
            v = f.read().rsplit(")", 1)[1].split()
        out["control" if t == str(pid) else f"thread {t}"] = (int(v[11]) + int(v[12])) / os.sysconf("SC_CLK_TCK")
    return out


class Reader:
    """A conductor's session that takes `rate` bytes a second (0: all)."""

    def __init__(self, node, rpc):
        pb, self.out, self.messages, self.bytes, self.rate = node.pb, queue.Queue(), 0, 0, 0
        self.to = pb.ToWorker
        self.out.put(self.to(hello=pb.SessionHello(version=1, cluster="baton", name="bench", node="n1", incarnation=9,
                                                   root_key=node.settings.root_key,
                                                   layout_id=node.settings.layout_id)))
        self.call = grpc.insecure_channel(rpc).stream_stream(
            "/baton.Worker/Session", request_serializer=self.to.SerializeToString,
            response_deserializer=lambda b: b)(iter(self.out.get, None))
        for f in (self.read, self.beat):
            threading.Thread(target=f, daemon=True).start()

    def read(self):
        try:
            for b in self.call:
                self.messages += 1
                self.bytes += len(b)
                if self.rate:
                    time.sleep(len(b) / self.rate)
        except grpc.RpcError as e:
            self.error = e.details()

    def beat(self):
        while True:
            self.out.put(self.to(heartbeat={"seq": 1}))
            time.sleep(0.4)


def submit_all(n, kv, s):
    pb, r = n.pb, random.Random(1)
    for i in range(1, STREAMS + 1):
        ids = [r.randrange(100, 2000) for _ in range(PROMPT)]
        kv.send(reserve=pb.Reserve(request=i, epoch=1, role=pb.WRITE, keys=b"\0" * 32, n_tokens=PROMPT, no_cache=True))
        s.out.put(pb.ToWorker(submit=pb.Submit(
            request=i, epoch=1, phases=pb.BOTH, tokens=pack(ids), n_prompt=PROMPT, root_key=n.settings.root_key,
            no_cache=True, sampling=pb.Sampling(temperature=0, top_p=1, repetition_penalty=1, logprobs=-1,
                                                max_new=TOKENS))))


def run(name, rate):
    n = Node(prefill={"engine.device": "null"},
             decode={"engine.device": "null", "engine.max_slots": STREAMS, "engine.pages": 140000, "engine.mem": "8GiB",
                     "worker.writeback": "false"})
    try:
        m, kv = n.member("decode"), Session(n, "kvstore")
        s = Reader(n, m.rpc)
        submit_all(n, kv, s)
        while n.metric("decode", RUNNING) < STREAMS:
            time.sleep(0.02)
        s.rate = rate
        time.sleep(1.5 if rate else 0)  # until what lies between has filled up
        a, c0, t0, g0, b0 = n.metric("decode", TOTAL), cpu_s(m.pid), time.monotonic(), s.messages, s.bytes
        while time.monotonic() < t0 + SECONDS and n.metric("decode", RUNNING) == STREAMS:
            time.sleep(0.1)
        tokens, c1, secs = n.metric("decode", TOTAL) - a, cpu_s(m.pid), time.monotonic() - t0
        messages = max(1, s.messages - g0)
        print(f"{name}: {tokens:.0f} tokens in {secs:.2f} s; {messages} messages of {(s.bytes - b0) / messages:.0f} bytes")
        used = {k: v - c0.get(k, 0) for k, v in c1.items() if v - c0.get(k, 0) > 0.01 * secs}
        for k, v in sorted(used.items(), key=lambda x: -x[1]):
            print(f"  {k}: {v / secs * 100:.0f} % of a core, {v / tokens * 1e6:.2f} us a token")
        assert not hasattr(s, "error"), s.error
        return tokens / secs, sum(used.values()) / tokens * 1e6, tokens / messages
    finally:
        n.stop()


def main():
    fast, slow = run("full speed", 0), run("held back", 400e3)
    print(f"bench,worker_null_rate,{fast[0]:.0f},tokens/s,asked for: 20000,{fast[0] / 20000:.1f}")
    print(f"bench,worker_cpu_a_token,{fast[1]:.2f},us,-,-")
    print(f"bench,worker_tokens_a_message,{fast[2]:.0f},tokens,streams: {STREAMS},{fast[2] / STREAMS:.2f}")
    print(f"bench,worker_held_back_rate,{slow[0]:.0f},tokens/s,-,-")
    print(f"bench,worker_held_back_cpu_a_token,{slow[1]:.2f},us,full speed: {fast[1]:.2f},{slow[1] / fast[1]:.2f}")


main()

"""baton-bench serve: load on any server of the OpenAI API, streaming, from one process that needs no package.

One connection a request; times begin when the request is written. Open loop (--rate: Poisson arrivals; --trace: a
trace's own, with prompts that share prefixes as its do) or closed loop (--concurrency). TBT of a request is the mean
of its longest tenth of gaps between tokens.
"""
import argparse
import asyncio
import collections
import csv
import json
import math
import os
import random
import re
import resource
import ssl
import sys
import time
from urllib.parse import urlsplit

import svg
import traces

WORDS = ("the king and queen of night shall speak no more to thee my lord come hither go sweet love "
         "death crown blood heart sword house friend day heaven hand eye tongue good noble").split()


EVENT_END = re.compile(rb"\r?\n\r?\n")
CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(;.*)?", re.S)
AHEAD = 64  # prompts of a replay that are made before they are due


class Failed(Exception):
    """A request that was not answered as wished; its text is counted and shown."""


class Refused(Failed):
    """Answered 429: the server would not take it."""


def count(usage, name):
    """A whole number that the server tells, or None."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value >= 0 else None


class Stream(asyncio.Protocol):
    """One request: its head and body go out, events come in. Only what is counted is parsed."""

    def __init__(self, request):
        self.request, self.buf, self.need, self.event = request, b"", 0, b""
        self.head = self.chunked = self.finished = False
        self.length, self.status, self.times, self.usage = None, 0, [], None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        self.start = time.perf_counter()
        transport.write(self.request)

    def connection_lost(self, exc):
        if self.done.done():
            return
        if self.head and self.status == 200 and self.finished:  # some servers leave without the last chunk
            self.end()
        else:
            self.done.set_exception(Failed(f"the connection ended early ({exc or 'closed by the server'})"))

    def fail(self, why, kind=Failed):
        if not self.done.done():
            self.done.set_exception(kind(why))
        self.transport.abort()

    def end(self):
        if self.done.done():
            return
        if self.status != 200:
            text = self.event.decode(errors="replace").strip()
            try:
                text = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                pass
            self.fail(f"HTTP {self.status}: {text[:200]}", Refused if self.status == 429 else Failed)
        elif not self.finished:
            self.fail("the stream ended without [DONE]")
        else:
            self.stop = time.perf_counter()
            self.done.set_result(None)
            self.transport.close()

    def data_received(self, data):
        now = time.perf_counter()
        self.buf = self.buf + data if self.buf else data
        if not self.head and not self.read_head():
            return
        if not self.chunked:
            body, self.buf = self.buf, b""
            self.body(body, now)
            if self.length is not None:
                self.length -= len(body)
                if self.length <= 0:
                    self.end()
            elif self.finished:  # whether or not the connection ends now
                self.end()
            return
        while self.buf and not self.done.done():
            if self.need == 0:
                eol = self.buf.find(b"\r\n")
                if eol < 0:
                    return
                m = CHUNK.fullmatch(self.buf[:eol])
                if m is None:
                    return self.fail("a chunk of the answer has no size")
                size = int(m[1], 16)
                if size == 0:
                    return self.end()
                self.buf, self.need = self.buf[eol + 2:], size + 2
            if len(self.buf) < self.need:
                return  # chunks are small: wait for all of it
            self.body(self.buf[:self.need - 2], now)
            self.buf, self.need = self.buf[self.need:], 0

    def read_head(self):
        end = self.buf.find(b"\r\n\r\n")
        while end >= 0 and re.match(rb"HTTP/1\.. 1\d\d\b", self.buf):  # 100 Continue and the like: not the answer
            self.buf = self.buf[end + 4:]
            end = self.buf.find(b"\r\n\r\n")
        if end < 0:
            if len(self.buf) > 65536:
                self.fail("the answer's head has no end")
            return False
        lines = self.buf[:end].decode("latin-1").split("\r\n")
        try:
            self.status = int(lines[0].split(" ")[1])
        except (IndexError, ValueError):
            self.fail(f"not HTTP: {lines[0][:80]}")
            return False
        for line in lines[1:]:
            name, _, value = line.partition(":")
            if name.lower() == "transfer-encoding":
                self.chunked = "chunked" in value.lower()
            elif name.lower() == "content-length":
                if not value.strip().isascii() or not value.strip().isdigit():
                    self.fail(f"the answer's Content-Length is {value.strip()[:40]}")
                    return False
                self.length = int(value)
        self.head, self.buf = True, self.buf[end + 4:]
        return True

    def body(self, data, now):
        self.event = self.event + data if self.event else data
        if self.status != 200:
            return
        while (end := EVENT_END.search(self.event)):
            event, self.event = self.event[:end.start()], self.event[end.end():]
            if not event.startswith(b"data:") or b"\n" in event:  # a comment, or other fields beside the data
                event = b"data:" + b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
            text = event[5:].strip()
            if text == b"[DONE]":
                self.finished = True
            elif not text:
                continue
            elif not self.times or b'"usage":{' in text or b'"usage": {' in text or b'"error"' in text:
                self.look_at(text, now)
            else:
                self.times.append(now)

    def look_at(self, text, now):
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            return self.fail("an event is not JSON")
        try:
            if event.get("error"):
                error = event["error"]
                error = error.get("message", error) if isinstance(error, dict) else error
                return self.fail(f"error event: {str(error)[:200]}")
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices") or []:
                delta = choice.get("delta")
                if delta is None or delta.get("content") or choice.get("finish_reason"):
                    self.times.append(now)
                    break
        except AttributeError:
            self.fail(f"an event is not of this API: {text[:80].decode(errors='replace')}")

    def row(self, base):
        if not self.times:
            raise Failed("no token came")
        gaps = sorted(b - a for a, b in zip(self.times, self.times[1:]))
        tail = gaps[-max(1, len(gaps) // 10):] if gaps else []
        usage = self.usage if isinstance(self.usage, dict) else {}
        tokens = count(usage, "completion_tokens")
        return {"start_s": self.start - base, "ttft_ms": (self.times[0] - self.start) * 1e3,
                "tbt_ms": sum(tail) / len(tail) * 1e3 if tail else None,
                "e2e_ms": (self.stop - self.start) * 1e3, "prompt_tokens": count(usage, "prompt_tokens"),
                "cached_tokens": count(usage.get("prompt_tokens_details"), "cached_tokens"),
                "tokens": len(self.times) if tokens is None else tokens, "error": "",
                "gaps": [g * 1e3 for g in gaps]}


class Answer(Stream):
    """One request whose answer is no stream: done's result is its body."""

    def body(self, data, now):
        self.event += data

    def connection_lost(self, exc):
        self.finished = True  # without a length the body ends with the connection
        super().connection_lost(exc)

    def end(self):
        self.finished = True
        super().end()


class Server:
    def __init__(self, opts):
        url = urlsplit(opts.url if "//" in opts.url else "http://" + opts.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            sys.exit(f"baton-bench: --url {opts.url} is not http://HOST:PORT or https://HOST:PORT")
        self.tls = ssl.create_default_context() if url.scheme == "https" else None
        self.host, self.port = url.hostname, url.port or (443 if self.tls else 80)
        self.prefix = url.path.rstrip("/").removesuffix("/v1")
        self.opts = opts

    def bytes(self, method, path, body=None):
        data = json.dumps(body).encode() if body is not None else b""
        key = f"Authorization: Bearer {self.opts.key}\r\n" if self.opts.key else ""
        for name, value in (("ttft", self.opts.ttft), ("tbt", self.opts.tbt)):
            if self.opts.slo and value and method == "POST":
                key += f"x-slo-{name}-ms: {round(value)}\r\n"
        return (f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
                f"Connection: close\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n").encode() + data

    async def model(self):
        """The id of the first model that the server names."""
        if self.opts.model:
            return self.opts.model
        _, answer = await asyncio.get_running_loop().create_connection(
            lambda: Answer(self.bytes("GET", "/v1/models")), self.host, self.port, ssl=self.tls)
        try:
            await asyncio.wait_for(answer.done, 30)
            return json.loads(answer.event)["data"][0]["id"]
        except asyncio.TimeoutError:
            answer.transport.abort()
            why = "no end of the answer after 30 s"
        except Failed as e:
            why = e
        except (ValueError, KeyError, IndexError, TypeError):
            why = answer.event[:200].decode(errors="replace")
        sys.exit(f"baton-bench: /v1/models names no model, give --model: {why}")

    async def ask(self, text, n, base=0.0):
        body = {"model": self.name, "max_tokens": n, "temperature": self.opts.temperature, "stream": True,
                "stream_options": {"include_usage": True}}
        if self.opts.ignore_eos:
            body["ignore_eos"] = True
        path = "/v1/chat/completions" if self.opts.chat else "/v1/completions"
        if self.opts.chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: Stream(self.bytes("POST", path, body)), self.host, self.port, ssl=self.tls)
        try:
            await asyncio.wait_for(stream.done, self.opts.timeout)
        except asyncio.TimeoutError:
            stream.transport.abort()
            raise Failed(f"no end after {self.opts.timeout} s") from None
        return stream.row(base)


class Prompts:
    """Texts of about --input tokens: two short questions tell how many tokens a word has here."""

    def __init__(self, opts):
        self.opts, self.rng, self.per_word, self.fixed = opts, random.Random(opts.seed), 1.0, 0.0
        self.shared = " ".join(self.rng.choice(WORDS) for _ in range(opts.shared_prefix))

    def words(self, n):
        return " ".join(self.rng.choice(WORDS) for _ in range(max(1, n)))

    async def calibrate(self, server):
        counts = []
        for n in (20, 100):
            row = await server.ask(self.words(n), 1)
            if row["prompt_tokens"] is None:
                return
            counts.append(row["prompt_tokens"])
        self.per_word = max(0.1, (counts[1] - counts[0]) / 80)
        self.fixed = counts[0] - 20 * self.per_word

    def text(self, i):
        n = round((self.opts.input - self.fixed) / self.per_word) - self.opts.shared_prefix
        own = f"{self.opts.seed} {i} " + self.words(n - 2)
        return f"{self.shared} {own}" if self.shared else own


class Job:
    """A request to be sent at due seconds (None: as soon as a client is free)."""

    def __init__(self, due, output, make, **note):
        self.due, self.output, self.make, self.note = due, output, make, note


class Run:
    def __init__(self, opts, jobs):
        self.opts, self.jobs, self.rows, self.open, self.peak, self.tokens = opts, jobs, [], 0, 0, 0
        self.errors, self.refused, self.late = {}, 0, 0.0

    async def one(self, server, job, text):
        self.open += 1
        self.peak = max(self.peak, self.open)
        began = time.perf_counter()
        try:
            row = await server.ask(text, job.output, self.base)
            self.tokens += row["tokens"]
        except (Failed, OSError) as e:
            why = str(e) or type(e).__name__
            if self.opts.trace and isinstance(e, Refused):
                self.refused += 1
            else:
                self.errors[why] = self.errors.get(why, 0) + 1
            row = {"start_s": began - self.base, "error": why, "refused": isinstance(e, Refused)}
        self.open -= 1
        self.rows.append({**row, **job.note})

    async def progress(self):
        while True:
            await asyncio.sleep(0.25)
            n, total = len(self.rows), len(self.jobs)
            bar = "#" * (30 * n // total)
            spent = time.perf_counter() - self.base
            refused = f"refused {self.refused}  " if self.opts.trace else ""
            sys.stderr.write(f"\r[{bar:30}] {n}/{total}  open {self.open}  {self.tokens / spent:.0f} tokens/s  "
                             f"{refused}failed {sum(self.errors.values())} ")
            sys.stderr.flush()

    async def open_loop(self, server):
        """Prompts are made before they are due, so that a burst leaves at once."""
        tasks, ready, todo = [], collections.deque(), iter(self.jobs)
        for job in todo:
            ready.append((job, job.make()))
            break
        while ready:
            job, text = ready.popleft()
            while True:
                wait = self.base + job.due - time.perf_counter()
                following = next(todo, None) if wait > 0 and len(ready) < AHEAD else None
                if following is None:
                    break
                ready.append((following, following.make()))
                await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, wait))
            self.late = max(self.late, time.perf_counter() - self.base - job.due)
            tasks.append(asyncio.create_task(self.one(server, job, text)))
            if not ready:
                ready.extend((j, j.make()) for j in [next(todo, None)] if j)
        await asyncio.gather(*tasks)

    async def go(self, server):
        bar = asyncio.create_task(self.progress()) if sys.stderr.isatty() else None
        self.base, cpu = time.perf_counter(), time.process_time()
        try:
            if self.jobs[0].due is not None:
                await self.open_loop(server)
            else:
                queue = iter([(job, job.make()) for job in self.jobs])

                async def client():
                    for job, text in queue:
                        await self.one(server, job, text)
                await asyncio.gather(*(client() for _ in range(min(self.opts.concurrency, len(self.jobs)))))
        finally:
            self.seconds = time.perf_counter() - self.base
            self.cpu = (time.process_time() - cpu) / self.seconds
            if bar:
                bar.cancel()
                sys.stderr.write("\n")


def jobs_of_load(opts, prompts):
    """opts.requests alike, at opts.rate or as clients are free."""
    arrivals, due, out = random.Random(opts.seed + 1), 0.0, []
    for i in range(opts.requests):
        out.append(Job(due if opts.rate else None, opts.output, lambda i=i: prompts.text(i)))
        due += arrivals.expovariate(opts.rate) if opts.rate else 0
    return out


def part_of_trace(opts):
    """The requests to be replayed; ends the program with what is wrong."""
    try:
        every = traces.load(opts.trace)
    except traces.Bad as e:
        sys.exit(f"baton-bench: {e}")
    part = every[int(opts.start * len(every)):int(opts.end * len(every))]
    fits = [q for q in part if not opts.longest
            or opts.input_scale * q.input + opts.output_scale * q.output <= opts.longest][:opts.requests]
    if not fits:
        sys.exit(f"baton-bench: {opts.trace}: none of {len(part)} requests is in --from, --to and --longest; widen them")
    if len(part) > len(fits) and opts.requests is None:
        print(f"{len(part) - len(fits)} of {len(part)} requests are longer than {opts.longest} tokens and left out")
    return fits


def jobs_of_trace(opts, part, prompts):
    first = part[0].at_ms
    return [Job((q.at_ms - first) / 1e3 / opts.speed, prompts.output(q, opts.output_scale),
                lambda q=q: prompts.of(q), due_s=(q.at_ms - first) / 1e3 / opts.speed,
                input_length=q.input, output_length=q.output) for q in part]


def percentile(values, p):
    """The smallest value that at least p percent of the values do not exceed."""
    v = sorted(values)
    return v[max(0, min(len(v) - 1, -(-len(v) * p // 100) - 1))] if v else float("nan")


def complain(path, e):
    sys.stderr.write(f"baton-bench: {path}: {e.strerror}\n")
    return False


def can_be_written(path):
    """Asked before the load; a file that was not there is not there afterwards."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return True  # a pipe's reader would take this for its end
    there = os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as e:
        return complain(path, e)
    if not there:
        os.remove(path)
    return True


def save(write, path, *args):
    """write(path, ...): all of the file or none of it."""
    try:
        write(path, *args)
        return True
    except OSError as e:
        if os.path.isfile(path):
            os.remove(path)
        return complain(path, e)


def write_csv(path, run, opts):
    fields = ["start_s", "ttft_ms", "tbt_ms", "e2e_ms", "prompt_tokens", "tokens", "error"]
    if opts.trace:
        fields[1:1] = ["due_s", "input_length", "output_length"]
        fields[-1:-1] = ["cached_tokens"]
    with open(path, "w", newline="") as f:
        out = csv.DictWriter(f, fields, extrasaction="ignore")
        out.writeheader()
        for r in sorted(run.rows, key=lambda r: r["start_s"]):
            out.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()})


def write_svg(path, good, opts):
    """Share of the answered requests at or below each TTFT and TBT."""
    panels = []
    for name, title, limit in (("ttft_ms", "Time to first token", opts.ttft),
                               ("tbt_ms", "Time between tokens (longest tenth)", opts.tbt)):
        v = sorted(r[name] for r in good if r[name] is not None)
        panels.append(svg.Panel(title, "ms", "share of requests", [(f"{len(v)} requests",
                      [(x, (i + 1) / len(v)) for i, x in enumerate(v)])] if v else [],
            [(f"objective {limit:g} ms", limit)] if limit else [], top=1))
    svg.write(path, panels)


def report(run, opts):
    good = [r for r in run.rows if not r["error"]]
    for why, n in sorted(run.errors.items(), key=lambda e: -e[1])[:5]:
        print(f"failed {n}x: {why}")
    saved = not opts.csv or save(write_csv, opts.csv, run, opts)
    saved = (not opts.svg or save(write_svg, opts.svg, good, opts)) and saved
    if not good:
        print(f"no request succeeded: {run.refused} refused, {len(run.rows) - run.refused} failed")
        return 1
    table = {"ttft": [r["ttft_ms"] for r in good], "tbt": [r["tbt_ms"] for r in good if r["tbt_ms"] is not None],
             "gap": [g for r in good for g in r["gaps"]], "e2e": [r["e2e_ms"] for r in good]}
    prompt = [r["prompt_tokens"] for r in good if r["prompt_tokens"] is not None]
    if not prompt:  # a server that tells no usage: what was asked for, then
        prompt = [r["input_length"] * opts.input_scale if opts.trace else opts.input for r in good]
    load = f"trace x {opts.speed:g}" if opts.trace else f"rate {opts.rate}/s" if opts.rate else \
        f"concurrency {opts.concurrency}"
    refused = f"{run.refused} refused, " if opts.trace else ""
    print(f"{load}: {len(good)} answered, {refused}{len(run.rows) - len(good) - run.refused} failed in {run.seconds:.1f} s; at most {run.peak} "
          f"at once; prompt {sum(prompt) / len(prompt):.0f} tokens, answer "
          f"{run.tokens / len(good):.0f}; this generator used {run.cpu * 100:.0f} % of a core")
    if opts.trace:
        print(f"sent at most {run.late * 1e3:.0f} ms after they were due")
        cached = [r["cached_tokens"] for r in good if r["cached_tokens"] is not None]
        if cached and sum(prompt):
            print(f"the server found {100 * sum(cached) / sum(prompt):.1f} % of the prompt tokens in its caches; a cache "
                  f"without bounds would find {100 * opts.shared:.1f} % of all prompts'")
            print(f"bench,serve_cached,{sum(cached) / sum(prompt):.4f},share of prompt tokens,no bounds {opts.shared:.4f},"
                  f"{sum(cached) / sum(prompt) / opts.shared if opts.shared else 1:.3f}")
    print(f"{'ms':6}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name, values in table.items():
        if values:
            print(f"{name:6}" + "".join(f"{percentile(values, p):10.2f}" for p in (50, 90, 99, 100)))
    for name, values in table.items():
        for p in ((50, 90, 99) if opts.trace else (50, 99)) if values else ():
            print(f"bench,serve_{name}_p{p},{percentile(values, p):.2f},ms,-,-")
    print(f"bench,serve_ttft_mean,{sum(table['ttft']) / len(good):.2f},ms,-,-")
    print(f"bench,serve_requests,{len(good) / run.seconds:.2f},1/s,-,-")
    print(f"bench,serve_tokens,{run.tokens / run.seconds:.1f},tokens/s,-,-")
    if opts.ttft or opts.tbt:
        met = [r for r in good if (not opts.ttft or r["ttft_ms"] <= opts.ttft)
               and (not opts.tbt or (r["tbt_ms"] or 0) <= opts.tbt)]
        print(f"bench,serve_goodput,{len(met) / run.seconds:.2f},1/s,all requests {len(good) / run.seconds:.2f},"
              f"{len(met) / len(run.rows):.3f}")
    return 0 if saved and not run.errors else 1


def share(text):
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def span(text):
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text} is not LOW:HIGH, as in 300:1500")
    return int(low), int(high)


def options(args):
    def positive(kind):
        def read(text):
            value = kind(text)
            if not 0 < value < math.inf:
                raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
            return value
        read.__name__ = kind.__name__
        return read
    p = argparse.ArgumentParser(prog="baton-bench serve", description="Load on a server of the OpenAI API; "
                                "exit status 1 if any request failed.", epilog="TBT: mean of the longest tenth of a "
                                "request's token gaps; gap: all token gaps; goodput: requests that meet --ttft and --tbt.")
    p.add_argument("--url", required=True, help="http://HOST:PORT, also with /v1")
    load = p.add_mutually_exclusive_group(required=True)
    load.add_argument("--rate", type=positive(float), metavar="R", help="requests per second, Poisson arrivals")
    load.add_argument("--concurrency", type=positive(int), metavar="C", help="keeps this many requests running")
    load.add_argument("--trace", metavar="FILE", help="a Mooncake .jsonl or Azure .csv: its arrivals and lengths, and "
                      "prompts that share prefixes as its do")
    p.add_argument("--input", type=positive(int), metavar="L", help="approximate prompt tokens (not with --trace)")
    p.add_argument("--output", type=positive(int), metavar="M", help="tokens to generate (not with --trace)")
    p.add_argument("--requests", type=positive(int), metavar="N", help="default: 30 s of --rate, 4 x --concurrency, or "
                   "all of the part of --trace")
    t = p.add_argument_group("replay of a trace")
    t.add_argument("--speed", type=positive(float), default=1.0, metavar="X", help="replays X times as fast (1)")
    t.add_argument("--from", dest="start", type=share, default=0.0, metavar="X", help="part of the trace, as shares of "
                   "its requests (0)")
    t.add_argument("--to", dest="end", type=share, default=1.0, metavar="X", help="end of that part (1)")
    t.add_argument("--length-scale", dest="input_scale", type=positive(float), default=1.0, metavar="X",
                   help="multiplies the trace's prompt lengths (1); a shared block of 512 tokens gets 512 X")
    t.add_argument("--output-scale", type=positive(float), metavar="X", help="multiplies the trace's answer lengths (default: --length-scale)")
    t.add_argument("--longest", type=positive(int), metavar="N", help="leaves out requests of more tokens, after scaling")
    t.add_argument("--ids", type=span, metavar="LOW:HIGH", help="prompts are token ids from this range, so lengths and "
                   "blocks are exact; default: words (not with --chat)")
    t.add_argument("--slo", action="store_true", help="sends --ttft and --tbt with each request (x-slo-ttft-ms, "
                   "x-slo-tbt-ms); a refusal (429) is counted, and is no failure")
    p.add_argument("--seed", type=int, default=1, help="seed of prompts and arrivals")
    p.add_argument("--shared-prefix", type=int, default=0, metavar="W", help="words that all prompts begin with")
    p.add_argument("--csv", metavar="FILE", help="writes one line for each request")
    p.add_argument("--svg", metavar="FILE", help="plots shares of requests by TTFT and TBT")
    p.add_argument("--chat", action="store_true", help="uses /v1/chat/completions")
    p.add_argument("--model", help="default: the first of /v1/models")
    p.add_argument("--key", help="API key")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false",
                   help="for servers that do not know ignore_eos: answers may be shorter than --output")
    p.add_argument("--ttft", type=positive(float), metavar="MS", help="objective for goodput")
    p.add_argument("--tbt", type=positive(float), metavar="MS", help="objective for goodput")
    p.add_argument("--timeout", type=positive(float), default=600.0, metavar="S", help="time limit of one request (600)")
    o = p.parse_args(args)
    if o.trace:
        o.output_scale = o.output_scale or o.input_scale
        if o.input or o.output or o.shared_prefix:
            p.error("--input, --output and --shared-prefix do not go with --trace: the trace says them")
        if o.ids and o.chat:
            p.error("--ids does not go with --chat: a message is text")
        if o.start >= o.end:
            p.error("--from is not before --to")
        return o
    for name in ("input", "output"):
        if getattr(o, name) is None:
            p.error(f"--{name} is required")
    o.requests = o.requests or (max(1, round(30 * o.rate)) if o.rate else 4 * o.concurrency)
    return o


async def work(opts):
    part = part_of_trace(opts) if opts.trace else None
    server, prompts = Server(opts), Prompts(opts)
    if part:
        replayed = traces.Prompts(opts.input_scale, opts.seed, opts.ids, WORDS)
        opts.shared = traces.shared_tokens(part) / sum(q.input for q in part)
    try:
        server.name = await server.model()
        if not opts.ids:
            await prompts.calibrate(server)
    except (OSError, asyncio.TimeoutError) as e:
        sys.exit(f"baton-bench: cannot reach {opts.url}: {e or type(e).__name__}")
    except Failed as e:
        sys.exit(f"baton-bench: {opts.url} does not answer a short question: {e}")
    if part:
        replayed.per_word, replayed.fixed = prompts.per_word, prompts.fixed
        run = Run(opts, jobs_of_trace(opts, part, replayed))
    else:
        run = Run(opts, jobs_of_load(opts, prompts))
    task = asyncio.create_task(run.go(server))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:  # Ctrl-C: what is there is reported
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print("interrupted: what follows covers the requests that had ended")
        report(run, opts)
        raise
    return report(run, opts)


def main(args):
    opts = options(args)
    if not all([can_be_written(path) for path in (opts.csv, opts.svg) if path is not None]):
        return 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return asyncio.run(work(opts))
    except KeyboardInterrupt:
        return 130

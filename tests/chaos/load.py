"""The load of a chaos run: requests of many shapes whose answers were taken from the undisturbed cluster first. Each client
draws its requests from its own seed. A refusal (429, 503) before the first byte is retried; whatever begins to be
answered must be answered whole and equal, unless the conductor that served it was taken away, or two workers were."""
import http.client
import json
import random
import threading
import time
from collections import Counter

from cluster import KEYS, PATIENCE, ROOT

GAP_S = 10        # between two events of a stream, and until a request that is not refused begins to be answered
DEADLINE_S = 60   # of a request, with all its retries
TWO_WORKERS = "two workers were lost"
EXACT = "avx512_bf16" in open("/proc/cpuinfo").read()  # elsewhere near-ties may fall the other way after a re-plan
TENANTS = sorted(KEYS)


class Violation(Exception):
    """What a client met must not be."""


class Refused(Exception):
    """429 or 503 with Retry-After, or nobody listens; nothing of an answer had come."""


class Broken(Exception):
    """The connection ended in the middle; `began`: after the first byte of an answer."""

    def __init__(self, text, began):
        super().__init__(text)
        self.began = began


class Lost(Exception):
    """An error event, or status 500, that names two lost workers."""


class Case:
    """A request: where to, body, and what the undisturbed cluster answers."""

    def __init__(self, name, path, body, expect=200):
        self.name, self.path, self.body, self.expect = name, path, body, expect
        self.want = None


class Answer:
    """An answer or a stream's events, in a form that can be compared."""

    def __init__(self):
        self.text, self.logprobs, self.reason, self.usage = {}, {}, {}, None
        self.done = False

    def take_choice(self, c):
        i = c["index"]
        if self.reason.get(i) is not None:
            raise Violation(f"choice {i} goes on behind its end")
        message = c.get("message") or c.get("delta") or {}
        piece = c.get("text") if "text" in c else message.get("content")
        self.text[i] = self.text.get(i, "") + (piece or "")
        lp = c.get("logprobs")
        if lp:
            kept = lp["content"] if "content" in lp else list(zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"] or lp["tokens"]))
            self.logprobs.setdefault(i, []).extend(kept or [])
        self.reason[i] = c.get("finish_reason")

    def seen(self):
        usage = {k: v for k, v in (self.usage or {}).items() if k.endswith("_tokens")}
        return self.text, self.logprobs, self.reason, usage

    def differs(self, want):
        """Empty, or in what."""
        got, ref = self.seen(), want.seen()
        if not EXACT:  # the numbers must be right on any processor
            got, ref = ({i: len(v) for i, v in x[1].items()} for x in (got, ref))
            return "" if got == ref else f"tokens by choice {got}, not {ref}"
        for what, g, w in zip(("text", "logprobs", "finish_reason", "usage"), got, ref):
            if g != w:
                return f"{what} is {str(g)[:700]}\n not {str(w)[:700]}"
        return ""


def catalogue(rng, tokenize):
    """Cases of all kinds. tokenize(text) gives token ids."""
    with open(f"{ROOT}/deploy/local/demo-prompt.txt") as f:
        words = f.read()

    def text(chars):
        at = rng.randrange(len(words) - 400)
        return (words[at:] + words * (chars // len(words) + 1))[:chars]

    cases = []

    def add(name, body, path="/v1/completions", **more):
        base = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
        cases.append(Case(name, path, base | body, **more))

    shared = text(1200)
    for i in range(4):
        add("greedy", {"prompt": text(rng.randrange(40, 900)), "max_tokens": rng.randrange(24, 200), "logprobs": 0})
        add("shared prefix", {"prompt": shared + text(60), "max_tokens": rng.randrange(16, 80)})
        add("seeded", {"prompt": text(300), "temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(2**31), "max_tokens": 120})
    for i in range(2):
        add("n", {"prompt": text(400), "temperature": 0.8, "seed": rng.randrange(2**31), "n": 2 + i, "logprobs": 1})
        add("penalties", {"prompt": text(200), "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1,
                          "max_tokens": 150})
        add("echo", {"prompt": text(800), "echo": True, "logprobs": 5, "max_tokens": 24})
        add("long prompt", {"prompt": text(rng.randrange(5000, 9000)), "max_tokens": 32})
        add("echo of a long prompt", {"prompt": text(5000), "echo": True, "logprobs": 2, "max_tokens": 8})
        add("long answer", {"prompt": text(100), "max_tokens": 900, "temperature": 0.7, "seed": rng.randrange(2**31)})
    add("several prompts", {"prompt": [text(200), text(500), text(90)], "n": 2, "temperature": 0.8, "seed": 7, "max_tokens": 40})
    add("ids", {"prompt": tokenize(text(350)), "max_tokens": 50})
    pieces = sorted({t for c in ("é", "€", "ß") for t in tokenize(c)})
    add("split characters", {"prompt": text(200), "temperature": 1.0, "seed": 3, "logit_bias": {str(t): 100 for t in pieces},
                             "max_tokens": 80})
    add("chat", {"messages": [{"role": "user", "content": text(300)}], "max_tokens": 60, "logprobs": True, "top_logprobs": 2},
        path="/v1/chat/completions")
    add("too long", {"prompt": text(60000)}, expect=400)
    add("bad value", {"prompt": "x", "temperature": -1}, expect=400)
    add("stop string", {"prompt": text(300), "max_tokens": 200, "stop": None})  # learn() fills it in
    return cases


class Client:
    """One HTTP request at a time, compared with what is wanted."""

    def __init__(self, run):
        self.run = run

    def ask(self, conductor, case, tenant, stream, salt=None, leave_after=None, timeout=None, on_event=None, slowly=0):
        """The Answer; None if it left on purpose. Raises Refused, Broken, Lost, Violation."""
        body = dict(case.body)
        if salt:
            body["cache_salt"] = salt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        limit = (timeout or GAP_S) * PATIENCE
        c = http.client.HTTPConnection(conductor.host, conductor.port, timeout=limit + 20)
        began = False
        try:
            started = time.monotonic()
            try:
                c.request("POST", case.path, json.dumps(body),
                          {"Content-Type": "application/json", "Authorization": "Bearer " + KEYS[tenant]})
                r = c.getresponse()
            except (ConnectionError, http.client.HTTPException) as e:
                raise Broken(repr(e), False) from e
            except TimeoutError as e:
                raise Violation(f"no answer within {limit + 20:.0f} s") from e
            self.not_late(started, limit, "the first byte")
            if r.status in (429, 503):
                if not r.getheader("Retry-After"):
                    raise Violation(f"{r.status} without Retry-After: {r.read()[:300]}")
                self.run.refused[r.status] += 1
                raise Refused(f"{r.status} {r.read()[:200]}")
            began = True
            if r.status != case.expect:
                text = r.read().decode(errors="replace")
                raise Lost(text) if r.status == 500 and TWO_WORKERS in text else Violation(f"status {r.status}: {text[:500]}")
            if r.status != 200:
                if "error" not in json.loads(r.read()):
                    raise Violation("a refusal without an error object")
                return Answer()
            return self.read_stream(r, limit, leave_after, on_event, slowly) if stream else self.read_whole(r)
        except TimeoutError as e:
            raise Violation(f"silent for {limit + 20:.0f} s in the middle of an answer") from e
        except (ConnectionError, http.client.HTTPException, ValueError) as e:
            raise Broken(repr(e), began) from e
        finally:
            c.close()

    def not_late(self, since, limit, what):
        waited = time.monotonic() - since
        if waited > limit + self.run.slack():
            raise Violation(f"{what} came after {waited:.1f} s")

    def read_whole(self, r):
        a, data = Answer(), json.loads(r.read())
        for choice in data["choices"]:
            a.take_choice(choice)
        a.usage, a.done = data["usage"], True
        return a

    def read_stream(self, r, limit, leave_after, on_event, slowly):
        a, buf, last, events = Answer(), b"", time.monotonic(), 0
        until = last + slowly  # so long it takes 200 bytes at a time
        while True:
            slow = time.monotonic() < until
            piece = r.read1(200 if slow else 65536)
            self.not_late(last, limit, "the next event")
            last = time.monotonic()
            if not piece:
                if not a.done:
                    raise Broken("the stream ended without [DONE]", True)
                return a
            buf += piece
            while b"\n\n" in buf:
                event, buf = buf.split(b"\n\n", 1)
                if a.done or not event.startswith(b"data: "):
                    raise Violation(f"strange event {event[:200]}")
                if event == b"data: [DONE]":
                    a.done = True
                    continue
                e = json.loads(event[6:])
                if "error" in e:
                    text = json.dumps(e["error"])
                    raise Lost(text) if TWO_WORKERS in text else Violation(f"an error event: {text[:400]}")
                events += 1
                a.usage = e.get("usage") or a.usage
                for choice in e.get("choices", []):
                    a.take_choice(choice)
                if on_event:
                    on_event(a)
                if leave_after is not None and events >= leave_after:
                    return None
            if slow:
                time.sleep(0.05)


class Load:
    """Threads of clients; pause() lets what is under way end."""

    def __init__(self, cluster, seed, clients, violation, slack=lambda: 0.0):
        self.cluster, self.seed, self.violation, self.slack_of = cluster, seed, violation, slack
        self.counts, self.refused, self.shapes = Counter(), Counter(), Counter()
        self.cond, self.paused, self.busy, self.over = threading.Condition(), True, 0, False
        self.generous_until = 0.0
        self.cases = []
        self.client = Client(self)
        self.threads = [threading.Thread(target=self.loop, args=(i,), daemon=True) for i in range(clients)]

    def slack(self):
        """Seconds by which an answer may be later: what this process itself was late, and while an overload is meant."""
        return self.slack_of() + (60 if time.monotonic() < self.generous_until else 0)

    def generous(self, seconds):
        self.generous_until = max(self.generous_until, time.monotonic() + seconds)

    # ---- what is right ----
    def tokenize(self, text):
        c = http.client.HTTPConnection(self.cluster.a.host, self.cluster.a.port, timeout=30)
        c.request("POST", "/tokenize", json.dumps({"prompt": text, "add_special_tokens": False}),
                  {"Content-Type": "application/json", "Authorization": "Bearer " + KEYS["alpha"]})
        out = json.loads(c.getresponse().read())["tokens"]
        c.close()
        return out

    def learn(self):
        """Each case alone, on the undisturbed cluster; then twice more: every way of asking gives the same."""
        self.cases = catalogue(random.Random(self.seed), self.tokenize)
        greedy = None
        for case in self.cases:
            if case.name == "stop string":
                free = Case("", case.path, {k: v for k, v in case.body.items() if k != "stop"})
                greedy = self.client.ask(self.cluster.a, free, "alpha", True).text[0]
                case.body["stop"] = [greedy[120:400] + "never", greedy[200:216]]
            case.want = self.client.ask(self.cluster.a, case, "alpha", True, timeout=60)
            for conductor, tenant, stream in ((self.cluster.b, "beta", False), (self.cluster.a, "alpha", True)):
                again = self.client.ask(conductor, case, tenant, stream, timeout=60)
                bad = again.differs(case.want)
                if bad:
                    raise AssertionError(f"{case.name} is not the same twice on an undisturbed cluster: {bad}")
        ends = next(c for c in self.cases if c.name == "stop string").want
        if "stop" not in ends.reason.values():
            raise AssertionError("the stop string does not end its answer")

    # ---- clients ----
    def start(self):
        for t in self.threads:
            t.start()
        self.go_on()

    def loop(self, i):
        rng = random.Random(f"{self.seed} client {i}")
        while True:
            case, tenant = rng.choice(self.cases), rng.choice(TENANTS)
            plan = dict(case=case, tenant=tenant, stream=rng.random() < 0.7, first=rng.randrange(2),
                        salt=f"salt {rng.randrange(20)}" if rng.random() < 0.5 else None,
                        leave=rng.randrange(1, 30) if rng.random() < 0.08 else None)
            think = rng.uniform(0, 0.1)
            with self.cond:
                self.cond.wait_for(lambda: not self.paused or self.over)
                if self.over:
                    return
                self.busy += 1
            try:
                self.one(**plan)
            except Exception as e:  # a bug of this program shows like one of the cluster
                self.violation(f"client {i}: {case.name}: {e!r}")
            finally:
                with self.cond:
                    self.busy -= 1
                    self.cond.notify_all()
            time.sleep(think)

    def one(self, case, tenant, stream, first, salt, leave):
        """A request until it is answered; other conductors, and later, where it is refused."""
        start, tries = time.monotonic(), 0
        while True:
            conductor = self.cluster.conductors()[(first + tries) % 2]
            tries += 1
            begun = time.monotonic()
            try:
                a = self.client.ask(conductor, case, tenant, stream, salt, leave if stream else None)
                bad = "" if a is None or case.expect != 200 else a.differs(case.want)
                self.shapes[case.name] += 1
                if bad:
                    self.counts["wrong"] += 1
                    self.violation(f"{case.name} at {conductor.daemon.name}: {bad}")
                else:
                    self.counts["left" if a is None else "ok"] += 1
                return
            except Refused:
                self.counts["refused"] += 1
            except Broken as e:
                if not self.was_away(conductor, begun, e.began):
                    self.counts["wrong"] += 1
                    return self.violation(f"{case.name} at {conductor.daemon.name}: {e}, and nothing was done to that conductor")
                self.counts["broken with its conductor" if e.began else "refused"] += 1
                if e.began:
                    return
            except Lost as e:
                if self.workers_lost(begun) < 2:
                    self.counts["wrong"] += 1
                    return self.violation(f"{case.name}: {e}, and not two workers were lost meanwhile")
                self.counts["lost two workers"] += 1
                return
            except Violation as e:
                self.counts["wrong"] += 1
                return self.violation(f"{case.name}{'' if stream else ' (whole)'} at {conductor.daemon.name}: {e}")
            if time.monotonic() - start > DEADLINE_S * PATIENCE + self.slack():
                self.counts["wrong"] += 1
                return self.violation(f"{case.name}: nobody served it within {DEADLINE_S} s, {tries} tries")
            time.sleep(min(1.0, 0.05 * 2**min(tries, 5)))

    def was_away(self, conductor, since, began):
        """Whether it was taken away meanwhile; what had begun may break only where it was not asked to let that end."""
        now = time.monotonic()
        return any(a - 1 <= now and (b is None or b + 1 >= since) and (breaks or not began) for a, b, breaks in conductor.away)

    def workers_lost(self, since):
        return sum(t >= since - 3 for d in self.cluster.kind("prefill", "decode") for t in d.deaths)

    # ---- quiet ----
    def pause(self, seconds=DEADLINE_S + 20):
        with self.cond:
            self.paused = True
            if not self.cond.wait_for(lambda: self.busy == 0, seconds * PATIENCE):
                self.violation(f"{self.busy} requests are still open {seconds} s after the last was sent")

    def go_on(self):
        with self.cond:
            self.paused = False
            self.cond.notify_all()

    def stop(self):
        self.pause()
        with self.cond:
            self.over = True
            self.cond.notify_all()
        for t in self.threads:
            t.join(5)

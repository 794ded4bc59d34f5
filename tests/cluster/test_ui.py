"""The cluster page in a real browser, with real streams of a real cluster, and what it reads: /admin/v1/ says what
batonctl says, the page shows what the server says, and a hostile prompt, name or path gets nothing. What needs Chromium
is skipped where there is none."""
import json
import os
import re
import socket
import subprocess

import pytest

import browser
from conftest import CTL, Cluster, wait_for

ALL = "sk-all-0123456789abcdef"
PROMPT = "ROMEO: " + "what is love? " * 40
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'`${alert(3)}"
PAGES = ("cluster", "requests", "goodput", "chat")

in_browser = pytest.mark.skipif(browser.find() is None, reason="no chromium here; deploy/local/setup.sh --tests installs it on Debian")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"sk-{scope}-0123456789abcdef id={scope} scopes={scope}\n" for scope in ("inference", "metrics", "admin"))
                    + ALL + " id=all scopes=inference,metrics,admin\n")
    keys.chmod(0o600)
    ssd = tmp_path_factory.mktemp("ssd")
    # a name that is markup reaches every view
    c = Cluster("--set", f"kvstore.kvstore.ssd.path={ssd}/{{node}}", "--set", "kvstore.kvstore.ssd.bytes=24MiB", "--set",
                "kvstore.kvstore.ssd.write_policy=always", "--set", f"conductor.conductor.api_keys_file={keys}", "--set", "all.model.served_name=<b>model</b>",
                "--set", "conductor.sched.ttft_objective_ms=60s", "--set", "conductor.conductor.http.allowed_origins=*", api_key=ALL)
    yield c
    c.stop()


def ctl(cluster, *args):
    addr = cluster.daemon("conductor")["grpc"]
    p = subprocess.run([CTL, *args, "--addr", addr, "-o", "json"], stdout=subprocess.PIPE, timeout=60, check=True,
                       env=dict(os.environ, BATON_API_KEY=ALL))
    return json.loads(p.stdout)


def test_status(cluster):
    page, nodes = cluster.get("/admin/v1/status"), ctl(cluster, "nodes")
    assert page["serving"] and page["ttft_objective_ms"] == 60000
    assert sorted((n["member"]["kind"], n["member"]["name"], n["member"]["node"], n["member"]["http"])
                  for n in page["nodes"]) == sorted((n["kind"], n["name"], n["node"], n["http"]) for n in nodes)
    store = [n for n in page["nodes"] if n["member"]["kind"] == "kvstore"]
    assert len(store) == 2 and all(n["pool"]["slots_total"] > 0 and n["pool"]["ssd_slots"] > 0 for n in store)
    cluster.complete(PROMPT, 1)
    wait_for(lambda: sum(n["pool"]["ssd_blocks"] for n in cluster.get("/admin/v1/status")["nodes"] if n["pool"]) > 0, 60,
             "blocks are on an SSD")


def test_life_of_a_request(cluster):
    """The parts of a request's time fit together, in the list and in its explanation."""
    status, headers, body = cluster.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 32, "ignore_eos": True},
                                            headers={"x-baton-timings": "1"})
    answer = json.loads(body)
    times = answer["timings"]
    recent = wait_for(lambda: [r for r in cluster.get("/admin/v1/requests")["recent"]["list"]
                               if r["id"] == answer["id"] and r["outcome"]], 60, "its end is known")[0]
    o = recent["outcome"]
    assert (o["tokens"], o["error"], o["in_time"]) == (32, "", True)
    for name in ("ttft_ms", "queue_ms", "prefill_ms", "decode_ms", "kv_bytes"):
        assert o[name] == pytest.approx(times[name], abs=0.01), name
    assert 0 <= o["planned_ms"] <= o["queue_ms"] + 1 and o["planned_ms"] <= o["ttft_ms"]
    assert recent["prefill"] == times["prefill"] and recent["decode"] == times["decode"] and not recent["both"]
    # both ends of the flow lie within the request, as all clocks here are one
    assert 0 <= o["flow_from_ms"] <= o["flow_to_ms"] <= o["ttft_ms"] + o["decode_ms"] + 50
    why = cluster.get("/admin/v1/explain/" + answer["id"])
    assert why["candidates"] and recent["candidates"] == []
    assert {k: v for k, v in why.items() if k != "candidates"} == {k: v for k, v in recent.items() if k != "candidates"}
    assert ctl(cluster, "explain", answer["id"])["candidates_total"] == why["candidates_total"]
    assert cluster.get("/admin/v1/explain/" + why["wire_id"])["id"] == answer["id"]
    assert "love" not in json.dumps(cluster.get("/admin/v1/requests"))  # no text of prompts or answers


def test_open_and_late(cluster):
    """A request that runs is in the list of the open ones; one that misses its objective is not in time."""
    before = cluster.get("/admin/v1/history")["list"][-1]
    events = cluster.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 7000, "n": 8, "ignore_eos": True})
    first = next(events)
    opened = [r for r in cluster.get("/admin/v1/requests")["open"]["list"] if r["id"] == first["id"]]
    assert opened and opened[0]["state"] == "decoding" and opened[0]["tokens"] >= 1, opened
    events.close()
    status, _, body = cluster.request("POST", "/v1/completions", {"prompt": "O", "max_tokens": 8, "ignore_eos": True},
                                      headers={"x-slo-tbt-ms": "0.001"})
    if status == 200:  # admission may refuse it at once: then nothing is late
        late = wait_for(lambda: cluster.get("/admin/v1/explain/" + json.loads(body)["id"])["outcome"], 60, "its end is known")
        assert late["in_time"] is False
    counts = ("finished", "refused")
    wait_for(lambda: sum(cluster.get("/admin/v1/history")["list"][-1][k] - before[k] for k in counts), 60, "it is counted")
    history = cluster.get("/admin/v1/history")
    after = history["list"][-1]
    assert [after[k] - before[k] for k in counts] == [status == 200, status == 429] and after["in_time"] == before["in_time"]
    assert history["ttft_objective_ms"] == 60000 and history["step_ms"] > 0
    wait_for(lambda: not cluster.get("/admin/v1/requests")["open"]["list"], 60, "the cancelled one is gone")


def test_hostile(cluster):
    for path in ("explain/%3Cscript%3E", "explain/" + "a" * 3000, "explain/%00", "explain/%0a%22", "explain/..%2f..", "nothing", "",
                 "status/", "explain"):
        status, headers, body = cluster.request("GET", "/admin/v1/" + path)
        assert status in (400, 404) and headers["content-type"] == "application/json", (path, status)
        assert len(json.loads(body)["error"]["message"]) < 600
    assert cluster.request("POST", "/admin/v1/status", {})[0] == 405
    # pages of other origins may use the API, as configured, but not read this
    status, headers, _ = cluster.request("GET", "/admin/v1/status", headers={"Origin": "https://elsewhere.example"})
    assert status == 200 and "access-control-allow-origin" not in headers
    assert "access-control-allow-origin" in cluster.request("GET", "/v1/models", headers={"Origin": "https://elsewhere.example"})[1]
    for path in "/admin/v1/nothing", "/admin/v1/explain/x":
        assert "access-control-allow-origin" not in cluster.request("GET", path, headers={"Origin": "https://elsewhere.example"})[1]
    preflight = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "GET"}
    assert "access-control-allow-methods" not in cluster.request("OPTIONS", "/admin/v1/status", headers=preflight)[1]
    status, headers, body = cluster.request("HEAD", "/admin/v1/requests")
    assert status == 200 and body == b"" and headers["cache-control"] == "no-store"


def test_names_of_others(cluster, make_cluster):
    """A page whose name was pointed at this server after the browser had loaded it is of the same origin for the browser. It
    has no key, but there are conductors without keys."""
    assert cluster.request("GET", "/admin/v1/requests", headers={"Host": "proxy.example"})[0] == 200
    c = make_cluster("--nodes", "1", "--prefill", "0", "--decode", "1", "--set", "decode.engine.device=null")
    for host, good in (("127.0.0.1", True), ("[::1]:80", True), ("localhost:8000", True), ("a.localhost", True),
                       (socket.gethostname() + ":1", True), ("evil.example", False), ("evil.example:80", False),
                       ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("[evil.example]", False)):
        status, _, body = c.request("GET", "/admin/v1/requests", headers={"Host": host})
        assert status == (200 if good else 403), host
        assert good or b"conductor.api_keys_file" in body and b"open" not in body


def test_scopes(cluster):
    """Only a key with the scope admin reads this; a stranger gets no hint of what there is."""
    for path in ("status", "requests", "history", "explain/x"):
        for key, expect in (("wrong", 401), ("sk-inference-0123456789abcdef", 403), ("sk-metrics-0123456789abcdef", 403)):
            status, _, body = cluster.request("GET", "/admin/v1/" + path, headers={"Authorization": "Bearer " + key})
            assert status == expect and b"kvstore" not in body, (path, key, status, body)
            assert expect == 401 or b"admin" in body
        status, _, _ = cluster.request("GET", "/admin/v1/" + path, headers={"Authorization": "Bearer sk-admin-0123456789abcdef"})
        assert status == (404 if "explain" in path else 200), path
    for path in ("/", "/docs", "/openapi.json", "/ui/reference.css"):
        c = cluster.connect()
        c.request("GET", path)
        assert c.getresponse().status == 200, path
        c.close()


def test_length(cluster):
    """The list of the last plans is bounded, and so is its answer."""
    for _ in range(30):
        cluster.complete("O", 1, n=1)
    recent = cluster.get("/admin/v1/requests")["recent"]["list"]
    assert 30 <= len(recent) <= 128
    assert [r["planned_ns"] for r in recent] == sorted((r["planned_ns"] for r in recent), reverse=True)
    assert len(cluster.request("GET", "/admin/v1/requests")[2]) < 200_000


@pytest.fixture(scope="module")
def shared():
    b = browser.Browser()
    yield b
    b.close()


@pytest.fixture
def page(shared, cluster):
    """The page with the key, at the width of a screen."""
    shared.size(1280, 800)
    shared.open(cluster.url + "/docs")
    shared.eval(f"sessionStorage.setItem('baton-key', {json.dumps(ALL)})")
    shared.problems.clear()
    shared.requests.clear()
    return shared


def go(page, cluster, where):
    page.open("about:blank")
    page.open(f"{cluster.url}/ui#{where}")


@in_browser
def test_asks_for_a_key(shared, cluster):
    """Without a key there is nothing to see; a key of another scope is told so; the right one shows the cluster."""
    page = shared
    page.size(1280, 800)
    page.open(cluster.url + "/ui")
    page.eval("sessionStorage.clear()")
    go(page, cluster, "cluster")
    page.wait("document.querySelector('#problem')?.innerText.includes('scope admin')")
    assert "kvstore" not in page.text("#view")
    page.click("#problem button")
    page.wait("document.querySelector('#key-dialog').open")
    page.type("sk-inference-0123456789abcdef")
    page.click("#key-dialog button.main")
    page.wait("document.querySelector('#problem').innerText.includes('admin') && !document.querySelector('#key-dialog').open")
    assert "kvstore" not in page.text("#view")
    page.click("#key-button")
    page.wait("document.querySelector('#key-dialog').open")
    page.eval("document.querySelector('#key-input').select()")
    page.type(ALL)
    page.key("Enter", 13, "\r")
    page.wait("document.querySelectorAll('.member').length >= 5 && document.querySelector('#problem').hidden")
    assert page.eval("sessionStorage.getItem('baton-key')") == ALL
    assert page.eval("JSON.stringify(localStorage)") == "{}" and not page.eval("document.cookie")
    assert ALL not in page.eval("document.documentElement.outerHTML")
    page.problems[:] = [p for p in page.problems if "401" not in p and "403" not in p]  # the browser notes these answers
    assert page.problems == []


@in_browser
def test_cluster_map(page, cluster):
    go(page, cluster, "cluster")
    page.wait("document.querySelectorAll('.member').length >= 5")
    st = cluster.get("/admin/v1/status")
    nodes = {n["member"]["node"] for n in st["nodes"]}
    assert page.eval("document.querySelectorAll('.node').length") == len(nodes) == 2
    shown = page.text("#view")
    for n in st["nodes"]:
        assert n["member"]["name"] in shown
    assert shown.count("SSD") == 2 and shown.count("slab") == 2
    assert page.text("#where").startswith("<b>model</b>")
    # what a user has opened stays open while numbers change
    page.click(".member summary")
    page.wait("document.querySelector('.member details').open")
    cluster.complete("O", 8)
    page.wait(f"document.querySelector('.figures').innerText.includes('{st['requests_total'] + 1}')")
    assert page.eval("document.querySelector('.member details').open")
    assert page.problems == []


@in_browser
def test_many_nodes(page, cluster):
    """A cluster of 300 nodes: the page shows some, those in trouble first, and finds the others."""
    page.open("about:blank")
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source="""
        const real = window.fetch;
        window.fetch = async (path, options) => {
          const r = await real(path, options);
          if (path !== "/admin/v1/status") return r;
          const j = await r.json(), some = j.nodes.filter((n) => n.member.node === "n1");
          j.nodes = Array.from({ length: 300 }, (_, i) => some.map((n) => ({ ...n, draining: i === 250,
            member: { ...n.member, node: `node-${i}`, name: `${n.member.name}-${i}` } }))).flat();
          return new Response(JSON.stringify(j));
        };""")["identifier"]
    try:
        go(page, cluster, "cluster")
        page.wait("document.querySelectorAll('.node').length === 40")
        assert page.text(".node h2").startswith("node-250") and "40 of 300" in page.text(".controls")
        page.click(".controls input")
        page.type("node-299")
        page.wait("document.querySelectorAll('.node').length === 1 && document.querySelector('.node h2').innerText === 'node-299'")
        assert page.problems == []
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


@in_browser
def test_a_stream(page, cluster):
    """A message streams in; its tokens have times and alternatives; Stop ends it; its explanation is one click away."""
    go(page, cluster, "chat")
    page.wait("document.querySelector('#chat-text')")
    page.click("#chat-text")
    page.type("ROMEO: " + ATTACK)
    page.key("Enter", 13, "\r")
    page.wait("document.querySelector('.numbers')?.innerText.includes('generated')")
    assert page.text(".turn.user") == "ROMEO: " + ATTACK
    n = page.eval("document.querySelectorAll('.strip .token').length")
    server, predicted = re.search(r"at the server ([\d.]+ m?s), predicted ([\d.]+ m?s)", page.text(".numbers")).groups()
    generated = int(re.search(r"(\d+) generated", page.text(".numbers")).group(1))
    assert n == generated > 0 and page.eval("document.querySelectorAll('.gaps rect').length") == n
    page.click(".strip .token")
    page.wait("document.querySelectorAll('.others .other').length >= 5")
    total = page.eval("[...document.querySelectorAll('.other .value')].reduce((s, e) => s + parseFloat(e.innerText), 0)")
    assert 0 < total <= 101
    # a long one is stopped in its middle
    page.eval("""document.querySelector('#chat-max').value = 7000;
        const real = window.fetch; /* this model ends soon by itself, and a fast server before anybody can click */
        window.fetch = async (path, o) => {
          if (!o?.body) return real(path, o);
          const r = await real(path, { ...o, body: JSON.stringify({ ...JSON.parse(o.body), ignore_eos: true }) });
          const from = r.body.getReader();
          let n = 0;
          return new Response(new ReadableStream({ async pull(to) {
            o.signal.throwIfAborted();
            if (n > 20000) await new Promise((_, no) => o.signal.addEventListener("abort", () => no(o.signal.reason)));
            const { done, value } = await from.read();
            if (done) return to.close();
            n += value.length;
            to.enqueue(value);
          } }), r);
        };""")
    page.click("#chat-text")
    page.type("JULIET: go on")
    page.click("form.ask button.main")
    page.wait("document.querySelectorAll('.turn')[3]?.querySelectorAll('.token').length > 5")
    page.click("button.stop")
    page.wait("document.querySelectorAll('.numbers')[1]?.innerText.includes('stopped') && !document.querySelector('button.stop')")
    assert page.eval("document.querySelectorAll('.turn')[3].querySelectorAll('.token').length") < 7000
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 60, "nothing is generated for nobody")
    page.click(".turn .numbers a")
    page.wait("document.querySelector('.detail h2 code')")
    ident = page.text(".detail h2 code")
    why = cluster.get("/admin/v1/explain/" + ident)
    assert why["outcome"]["tokens"] == generated

    def as_ms(text):
        return float(text.split()[0]) * (1 if text.endswith("ms") else 1000)

    # as rounded by the page
    assert as_ms(server) == pytest.approx(why["outcome"]["ttft_ms"], rel=0.06, abs=0.06)
    assert as_ms(predicted) == pytest.approx(why["ttft_ms"], rel=0.06, abs=0.06)
    assert page.problems == []


@in_browser
def test_waterfalls(page, cluster):
    """The parts of a bar are as long as the server says, and the filter finds a request."""
    answer = cluster.complete("ROMEO: " + "what is love? " * 60, 64, ignore_eos=True)
    cluster.request("POST", "/v1/completions", {"prompt": "O", "max_tokens": 1}, headers={"x-request-id": "attack"})
    go(page, cluster, "requests/" + answer["id"])
    page.wait("document.querySelector('.detail .waterfall .decode') && document.querySelectorAll('a.row').length > 1")
    e = cluster.get("/admin/v1/explain/" + answer["id"])
    o = e["outcome"]
    end = max(o["ttft_ms"] + o["decode_ms"], o["flow_to_ms"], e["ttft_ms"])
    for cls, width in (("prefill", o["prefill_ms"]), ("decode", o["decode_ms"]), ("transfer", o["flow_to_ms"] - o["flow_from_ms"])):
        got = float(page.eval(f"document.querySelector('.detail .waterfall rect.{cls}:not(.predicted)').getAttribute('width')"))
        assert got == pytest.approx(max(1000 * width / end, 1.5), abs=0.5), cls
    text = page.text(".detail")
    assert e["prefill"] in text and e["decode"] in text and e["meaning"] in text and "chosen" in text
    page.click(".controls input")
    page.type(answer["id"][-10:])
    page.wait("document.querySelectorAll('a.row').length === 1")
    page.key("Escape", 27)
    page.wait("!document.querySelector('.detail') && location.hash === '#requests'")
    assert page.problems == []


@in_browser
def test_goodput(page, cluster):
    cluster.complete("O", 8)
    go(page, cluster, "goodput")
    page.wait("document.querySelectorAll('.chart').length === 6 && document.querySelector('polyline.line')")
    wait_for(lambda: cluster.get("/admin/v1/history")["list"][-1]["in_time"] > 0, 60, "the request is counted")
    assert "60.0 s" in page.text(".figures")
    assert page.problems == []


@in_browser
def test_hostile_answers(page, cluster):
    """Markup in whatever the server says stays text: here every string of its answers is an attack."""
    page.open("about:blank")
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source="""
        const real = window.fetch;
        const poison = (v) => Array.isArray(v) ? v.map(poison) : v && typeof v === "object"
          ? Object.fromEntries(Object.entries(v).map(([k, x]) => [k, k === "kind" || k === "state" ? x : poison(x)]))
          : typeof v === "string" ? ATTACK + v : v;
        window.fetch = async (path, options) => {
          const r = await real(path, options);
          if (!String(path).startsWith("/admin/")) return r;
          return new Response(JSON.stringify(poison(await r.json())), { status: r.status });
        };""".replace("ATTACK", json.dumps(ATTACK)))["identifier"]
    try:
        for where in PAGES + ("requests/" + "%3Cimg%20src=x%20onerror=alert(4)%3E",):
            page.open("about:blank")
            page.open(f"{cluster.url}/ui#{where}")
            page.wait("document.querySelector('#where').innerText.includes('onerror') && document.querySelector('#view').innerText")
            assert page.eval("document.querySelectorAll('#view script, #view img, #where img').length") == 0, where
            if where != "chat" and where != "goodput":
                assert "onerror" in page.eval("document.querySelector('#view').textContent"), where
        page.problems[:] = [p for p in page.problems if "status of 404" not in p]  # of the request that is not there
        assert page.problems == []
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    # and were there markup, the policy would let nothing of it run
    page.open(cluster.url + "/ui")
    page.eval("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit = 1\">')")
    wait_for(lambda: page.eval("window.hit === undefined") and any("Content Security Policy" in p for p in page.problems), 60,
             "the browser tells what it has blocked")


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_layout(page, cluster, width):
    """No view is wider than the window, in both colours, and nothing was loaded from elsewhere."""
    page.size(width, 800)
    go(page, cluster, "chat")
    for where in PAGES:
        page.eval(f"location.hash = '{where}'")
        page.wait(f"document.querySelector('#view').className === '{where}' && document.querySelector('#view').innerText.length > 20 && "
                  "document.querySelector('#where').innerText && !document.querySelector('#view').innerText.includes('Waiting for')")
        for dark in (False, True):
            page.size(width, 800, dark)
            assert page.eval("document.documentElement.scrollWidth") <= width, (where, dark)
            back = page.eval("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 200) == dark
    assert page.requests and all(r.startswith((cluster.url, "about:", "data:")) for r in page.requests), page.requests
    assert page.problems == []


@in_browser
def test_keyboard(page, cluster):
    go(page, cluster, "cluster")
    page.wait("document.querySelectorAll('.member').length >= 5")
    page.eval("document.querySelector('#tab-cluster').focus()")
    for name in ("requests", "goodput", "chat", "cluster"):
        page.key("ArrowRight", 39)
        page.wait(f"document.activeElement.id === 'tab-{name}' && document.querySelector('#view').className === '{name}'")
        assert page.eval("document.activeElement.getAttribute('aria-selected')") == "true"
    page.key("Tab", 9)
    assert page.eval("document.activeElement.getAttribute('href')") == "/docs"


def test_history_goes_on(cluster):
    """A step in five seconds; a busy machine may be late for one."""
    wait_for(lambda: len(cluster.get("/admin/v1/history")["list"]) > 2, 60, "a further sample", every_s=0.3)
    *steps, now = [s["at_ns"] for s in cluster.get("/admin/v1/history")["list"]]
    assert steps == sorted(steps) and now >= steps[-1] and 1e9 < steps[1] - steps[0] < 60e9

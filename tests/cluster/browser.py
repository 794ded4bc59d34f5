"""Headless Chromium, driven by the DevTools protocol over two pipes: for tests of the web page and for its screenshots.
Needs no package of Python or npm."""
import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

from sanitizer import PATIENCE


def find():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. What its scripts report as errors, and what its policy blocked, is in `problems`."""

    def __init__(self):
        self.problems, self.requests = [], []
        self.folder = tempfile.mkdtemp(prefix="baton-chromium-")
        to, mine = os.pipe()
        theirs, back = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to, back)]  # 3 and 4 may be among the pipes themselves
        os.close(to)
        os.close(back)
        self.out, self.back, self.buf, self.n = mine, theirs, b"", 0

        def place():
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [find(), "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
             "--hide-scrollbars", "--force-color-profile=srgb", "--user-data-dir=" + self.folder, "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=place, pass_fds=(3, 4),
            start_new_session=True)
        for fd in ends:
            os.close(fd)
        target = self.call("Target.getTargets")["targetInfos"]
        page = next(t for t in target if t["type"] == "page")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    session = None

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
            self.process.wait(30)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.back)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- protocol ----
    def call(self, method, **params):
        self.n += 1
        message = {"id": self.n, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        wanted, end = self.n, time.monotonic() + 120 * PATIENCE
        while True:
            answer = self.read(end)
            assert answer is not None, f"Chromium does not answer {method}"
            if answer.get("id") == wanted:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def read(self, end):
        """The next message; events are noted on the way."""
        while b"\0" not in self.buf:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.back], [], [], left)[0]:
                return None
            piece = os.read(self.back, 1 << 20)
            assert piece, "Chromium has ended"
            self.buf += piece
        line, self.buf = self.buf.split(b"\0", 1)
        message = json.loads(line)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, method, p):
        if method == "Runtime.exceptionThrown":
            d = p["exceptionDetails"]
            self.problems.append("exception: " + d.get("exception", {}).get("description", d["text"]))
        elif method == "Log.entryAdded" and p["entry"]["level"] == "error":
            self.problems.append(f"{p['entry']['source']}: {p['entry']['text']} {p['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and p["type"] in ("error", "assert"):
            self.problems.append("console: " + str([a.get("value") for a in p["args"]]))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append("dialog: " + p["message"])
            os.write(self.out, json.dumps({"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True},
                                           "sessionId": self.session}).encode() + b"\0")
        elif method == "Network.requestWillBeSent":
            self.requests.append(p["request"]["url"])

    # ---- the page ----
    def size(self, width, height, dark=False, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"}])

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def eval(self, script):
        r = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in r, (script, r["exceptionDetails"])
        return r["result"].get("value")

    def wait(self, script, seconds=60):
        end = time.monotonic() + seconds * PATIENCE
        while True:
            v = self.eval(f"(v => v instanceof Node ? true : v)({script})")
            if v:
                return v
            assert time.monotonic() < end, f"not within {seconds} s: {script}; problems: {self.problems}; page: " + \
                self.eval("document.body.innerText")[:1500]
            time.sleep(0.05)

    def text(self, selector):
        return self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? null")

    def click(self, selector):
        """A click of the mouse at the middle of the element."""
        x, y = self.wait(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null; "
                         "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect(); "
                         "return r.width ? [r.x + r.width / 2, r.y + r.height / 2] : null; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def key(self, name, code=0, text=None):
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, windowsVirtualKeyCode=code, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, windowsVirtualKeyCode=code)

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)["data"]
        with open(path, "wb") as f:
            f.write(base64.b64decode(data))

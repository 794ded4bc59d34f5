"""Clients over HTTPS with API keys: `baton-local up --tls --keys`, certificates and keys that change while streams run,
and clients that mean no good. Handshakes are tests/unit/test_http_tls.c's, lines of keys tests/unit/test_front_keys.c's."""
import json
import os
import socket
import ssl
import subprocess
import threading

import pytest

from conftest import CTL, ROOT, Cluster, wait_for

CERTS = os.path.join(ROOT, "deploy", "local", "baton-certs")
BODY = {"prompt": "To be, or not to be", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def secure():
    """On an engine whose answers are the same beside any others, and which takes 3 ms for a token of all of them."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("BATON_NULL_PACE", "3000,0")
        c = Cluster("--tls", "--keys", "--set", "prefill.engine.device=null", "--set", "decode.engine.device=null")
    yield c
    c.stop()


def key(c, scope):
    with open(os.path.join(c.state_dir, "keys", scope + ".key")) as f:
        return f.read().strip()


def bearer(text):
    return {"Authorization": "Bearer " + text}


def keys_file(c):
    return os.path.join(c.state_dir, "keys", "api-keys")


def ctl(*args, **env):
    e = {k: v for k, v in os.environ.items() if k not in ("BATON_ADDR", "BATON_API_KEY")}
    p = subprocess.run([CTL, *args], env=dict(e, **env), capture_output=True, text=True, timeout=60)
    return p.returncode, p.stdout.strip(), p.stderr


def log(c):
    with open(c.daemon("conductor")["log"], errors="replace") as f:
        return f.read()


def serial(c):
    with socket.create_connection((c.host, c.port), timeout=60) as s, c.tls.wrap_socket(s, server_hostname=c.host) as t:
        return t.getpeercert()["serialNumber"]


def test_each_scope_opens_its_doors(secure):
    scopes = {name: key(secure, name) for name in ("inference", "metrics", "admin")}
    for path, needs in (("/v1/models", "inference"), ("/metrics", "metrics"), ("/admin/v1/status", "admin"),
                        ("/health", None), ("/version", None)):
        assert secure.request("GET", path, headers={"Authorization": ""})[0] == (401 if needs else 200)
        for name, secret in scopes.items():
            status, _, body = secure.request("GET", path, headers=bearer(secret))
            assert status == (200 if needs in (None, name) else 403), (path, name, body)
    # batonctl finds the local cluster's key; another one must have the scope.
    for args, env, rc, says in (((), {}, 0, ""), (("--key-file", os.path.join(secure.state_dir, "keys", "inference.key")), {}, 1, "needs the scope admin"),
                                ((), {"BATON_API_KEY": "bt-no"}, 1, "a valid API key is required")):
        got, _, err = ctl("--dir", secure.state_dir, *args, "drain", "n9", **env)
        assert got == 1 and says in err, err  # there is no n9
        got, _, err = ctl("--dir", secure.state_dir, *args, "status", **env)
        assert got == rc and says in err, err
    lines = [line for line in log(secure).splitlines() if "ev=audit" in line]
    for who, what, target, result in (("key:admin", "Drain", "node=n9", "failed"), ("key:admin", "Status", '""', "ok"),
                                      ("cert:baton://", "Drain", '""', "denied")):
        assert any(f"who={who}" in x or f'who="{who}' in x for x in lines if f"what={what} target={target} result={result}" in x or
                   f'what={what} target="{target}" result={result}' in x), (who, what, lines)


def test_certificates_change_under_load(secure):
    """Streams go on while the files are replaced three times, and every new connection is served."""
    folder, want = os.path.join(secure.state_dir, "tls"), None
    headers, stop, failed, done = bearer(key(secure, "inference")), threading.Event(), [], []

    def load():
        while not stop.is_set():
            try:
                events = list(secure.stream("/v1/completions", BODY, headers=headers))
                text = "".join(e["choices"][0]["text"] for e in events if e != "[DONE]" and e["choices"])
                assert events[-1] == "[DONE]"
                done.append(text)
            except Exception as e:  # noqa: BLE001: any of them is a failure
                failed.append(repr(e))

    threads = [threading.Thread(target=load) for _ in range(3)]
    # One stream over one connection for all of the time.
    c = secure.connect()
    for t in threads:
        t.start()
    try:
        for _ in range(2):
            before = serial(secure)
            subprocess.run([CERTS, "--dir", folder, "http", "localhost,127.0.0.1"], check=True)
            wait_for(lambda: serial(secure) != before, 60, "new connections get the new certificate")
            c.request("POST", "/v1/completions", json.dumps(BODY), dict(headers, **{"Content-Type": "application/json"}))
            r = c.getresponse()  # over the connection that was made with the first one
            text = json.loads(r.read())["choices"][0]["text"]
            want = want or text
            assert r.status == 200 and text == want
        with open(os.path.join(folder, "http", "tls.crt"), "w") as f:
            f.write("not a certificate\n")
        wait_for(lambda: "ev=tls_not_renewed" in log(secure), 60, "the log names the file")
        serial(secure)  # the last good one is still in use
        wait_for(lambda: failed or len(done) > 10, 60, "streams end")
    finally:
        stop.set()
        for t in threads:
            t.join()
        c.close()
        subprocess.run([CERTS, "--dir", folder, "http", "localhost,127.0.0.1"], check=True)
    assert not failed and set(done) == {want}, (failed, set(done))


def test_a_key_is_revoked_while_its_stream_runs(secure):
    rc, secret, err = ctl("key", "add", "--file", keys_file(secure), "--id", "guest", "--tenant", "guest")
    assert rc == 0, err
    wait_for(lambda: secure.request("GET", "/v1/models", headers=bearer(secret))[0] == 200, 60, "the key counts")
    stream = secure.stream("/v1/completions", dict(BODY, max_tokens=1500), headers=bearer(secret))
    first = next(stream)
    assert ctl("key", "revoke", "guest", "--file", keys_file(secure))[0] == 0
    wait_for(lambda: secure.request("GET", "/v1/models", headers=bearer(secret))[0] == 401, 60, "the key counts no more")
    assert list(stream)[-1] == "[DONE]" and first["choices"]  # what had begun goes on to its end
    status, headers, body = secure.request("GET", "/v1/models", headers=bearer(secret))
    assert status == 401 and b"(id guest) was revoked at" in body and headers["www-authenticate"].startswith("Bearer")
    rc, out, _ = ctl("key", "list", "--file", keys_file(secure), "-o", "json")
    assert {k["id"]: k["state"] for k in json.loads(out)} == {"inference": "valid", "metrics": "valid", "admin": "valid", "guest": "revoked"}
    # Two edits at once: none is lost.
    many = [subprocess.Popen([CTL, "key", "add", "--file", keys_file(secure), "--id", f"n{i}"], stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL) for i in range(8)]
    assert [p.wait(60) for p in many] == [0] * 8
    assert len(json.loads(ctl("key", "list", "--file", keys_file(secure), "-o", "json")[1])) == 12
    assert secret not in open(keys_file(secure)).read() and secret not in log(secure)


def test_hostile_clients(secure):
    """Guesses, headers of all sizes and bytes that are no TLS get their answers, and others theirs."""
    context = secure.tls

    def raw(data, tls=True):
        with socket.create_connection((secure.host, secure.port), timeout=60) as s:
            with (context.wrap_socket(s, server_hostname=secure.host) if tls else s) as t:
                try:
                    t.sendall(data)
                    out = b""
                    while piece := t.recv(65536):
                        out += piece
                except (ConnectionError, ssl.SSLError):
                    pass
                return out

    head = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    assert b" 400 " in raw(head + b"\r\n", tls=False) and b"use https://" in raw(head + b"\r\n", tls=False)
    raw(os.urandom(2000), tls=False)
    assert b" 401 " in raw(head + b"Authorization: Bearer " + b"k" * 12000 + b"\r\n\r\n")
    assert b" 431 " in raw(head + b"Authorization: Bearer " + b"k" * 40000 + b"\r\n\r\n")
    assert b" 401 " in raw(head + b"Authorization: Bearer " + key(secure, "inference").encode() + b"x\r\n\r\n")
    assert b" 401 " in raw(head + b"Authorization: Bearer \xff\xfe\r\n\r\n")
    assert b" 400 " in raw(head + b"api-key: a\r\napi-key: b\r\n\r\n")
    refused = 'baton_http_keys_refused_total{reason="unknown_key"}'

    def metrics():
        status, _, body = secure.request("GET", "/metrics", headers=bearer(key(secure, "metrics")))
        assert status == 200
        return dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))

    before = int(metrics()[refused])
    wrong = []

    def guess(n):
        c = secure.connect()
        for i in range(50):
            c.request("POST", "/v1/completions", b"x" * 2000, bearer(f"bt-{n}-{i}"))
            r = c.getresponse()
            r.read()
            wrong.append(r.status)
            if r.getheader("Connection") == "close":
                c.close()
        c.close()

    threads = [threading.Thread(target=guess, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    status, _, body = secure.request("POST", "/v1/completions", BODY, bearer(key(secure, "inference")))
    for t in threads:
        t.join()
    assert status == 200 and wrong == [401] * 200, (status, body, set(wrong))
    assert int(metrics()[refused]) == before + 200
    assert log(secure).count("ev=key_refused") < 20
    text = log(secure)
    assert not [name for name in ("inference", "metrics", "admin") if key(secure, name) in text]

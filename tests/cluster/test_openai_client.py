"""Clients that people have, unchanged: the openai package of npm and curl, against a running cluster.
Without node, npm or a registry the openai tests are skipped with the reason."""
import json
import os
import shutil
import subprocess

import pytest

import npm_packages
from conftest import BUILD, LOCAL, wait_for

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "openai-client")
SCENARIOS = ["models", "chat", "chat_stream", "chat_stream_helper", "chat_choices", "chat_logprobs",
             "completions", "structured", "errors", "abort"]


@pytest.fixture(scope="module")
def client():
    """A folder with the pinned package installed beside the script."""
    folder = npm_packages.install(HERE)
    shutil.copy(os.path.join(HERE, "client.mjs"), folder)
    return folder


def run(client, url, model, scenario, key=None):
    env = dict(os.environ)
    if key is not None:
        env["TEST_API_KEY"] = key
    p = subprocess.run(["node", "client.mjs", url, model, scenario], cwd=client, env=env,
                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                       timeout=120)
    out = p.stdout.decode(errors="replace")
    assert p.returncode == 0 and out.splitlines()[-1] == "ok", out


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_openai(cluster, client, scenario):
    gone = "baton_http_disconnects_total"
    before = cluster.metrics("conductor")[gone]
    run(client, cluster.url, cluster.model, scenario)
    if scenario == "abort":
        wait_for(lambda: cluster.metrics("conductor")[gone] == before + 3, 60, "three have left")
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 60,
             "nothing is generated for nobody")


def test_openai_with_keys(client, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    keys.chmod(0o600)
    state = str(tmp_path / "state")
    env = dict(os.environ, BATON_BIN=os.path.join(BUILD, "bin"))
    try:
        p = subprocess.run([LOCAL, "up", "--dir", state, "--port", "0", "--nodes", "1", "--prefill",
                            "0", "--decode", "1", "--set",
                            f"conductor.conductor.api_keys_file={keys}"], env=env, timeout=240,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert p.returncode == 0, p.stderr.decode()
        url = p.stdout.decode().split()[-1]
        model = "shakespeare-llama-6m"
        run(client, url, model, "unauthorized", "sk-wrong")
        run(client, url, model, "chat", "sk-right")
    finally:
        subprocess.run([LOCAL, "down", "--dir", state], timeout=60, check=True)


# ---- curl ----

def curl(*args, data=b""):
    p = subprocess.run(["curl", "-sS", *args], input=data, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, timeout=60)
    return p.returncode, p.stdout.decode()


def post(cluster, path, body, *args):
    return curl(cluster.url + path, "-H", "Content-Type: application/json", "--data-binary", "@-",
                *args, data=json.dumps(body).encode())


def test_curl(cluster):
    rc, out = curl(cluster.url + "/v1/models")
    assert rc == 0 and json.loads(out)["data"][0]["id"] == cluster.model
    body = {"model": cluster.model, "prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0}
    rc, out = post(cluster, "/v1/completions", body)
    assert rc == 0
    whole = json.loads(out)["choices"][0]["text"]
    rc, out = post(cluster, "/v1/completions", dict(body, stream=True), "-N")
    assert rc == 0 and out.endswith("data: [DONE]\n\n")
    events = [json.loads(e[6:]) for e in out.split("\n\n")[:-2]]
    assert "".join(e["choices"][0]["text"] for e in events) == whole
    # -d alone says it is a form; the answer names the remedy. -f makes a status an exit code
    rc, out = curl(cluster.url + "/v1/completions", "-d", json.dumps(body))
    assert rc == 0 and "application/json" in json.loads(out)["error"]["message"]
    rc, out = post(cluster, "/v1/completions", dict(body, n=0), "-f")
    assert rc == 22
    # one connection for several requests, Expect: 100-continue for a large body, HEAD, HTTP/1.0
    rc, out = curl(cluster.url + "/version", cluster.url + "/health", "-w", "%{num_connects} ")
    assert rc == 0 and out.endswith("}1 ok0 "), out  # the second had no connection of its own
    big = {"prompt": "word " * 50000}
    rc, out = post(cluster, "/tokenize", big, "-H", "Expect: 100-continue")
    assert rc == 0 and json.loads(out)["count"] > 50000
    assert curl("-I", cluster.url + "/health")[1].startswith("HTTP/1.1 200 OK")
    assert curl("-0", cluster.url + "/health") == (0, "ok")


def test_curl_leaves(cluster):
    before = cluster.metrics("conductor")["baton_http_disconnects_total"]
    body = {"prompt": "O", "max_tokens": 7000, "n": 8, "ignore_eos": True, "stream": True}
    p = subprocess.Popen(["curl", "-sSN", cluster.url + "/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)],
                         stdout=subprocess.PIPE)
    assert p.stdout.read(6) == b"data: "
    p.terminate()
    out = p.communicate(timeout=60)[0]
    assert b"[DONE]" not in out
    wait_for(lambda: cluster.metrics("conductor")["baton_http_disconnects_total"] > before, 60, "it is noticed")

"""deploy/kubernetes/baton.yaml: Kubernetes' types accept it, and the daemons accept the settings in it."""
import json
import os
import re
import shutil
import subprocess

import pytest

import npm_packages
from conftest import BUILD, ROOT

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kubernetes")
MANIFEST = os.path.join(ROOT, "deploy", "kubernetes", "baton.yaml")
MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
PARTS = ["etcd", "conductor", "kvstore", "prefill", "kvstore", "decode"]


@pytest.fixture(scope="module")
def folder():
    made = npm_packages.install(HERE)
    shutil.copy(os.path.join(HERE, "typed.js"), made)
    return made


def test_kubernetes_types_accept_the_manifest(folder):
    """One run of the compiler also looks at a manifest with a mistake: it finds nothing else."""
    with open(MANIFEST, "rb") as f:
        text = f.read()
    texts = {"manifest": text, "wrong": text.replace(b"readinessProbe", b"readynessProbe", 1)}
    for name, typed in texts.items():
        with open(os.path.join(folder, name + ".ts"), "wb") as f:
            subprocess.run(["node", "typed.js"], cwd=folder, input=typed, stdout=f, check=True, timeout=60)
    p = subprocess.run(["node", "node_modules/typescript/bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "node",
                        "--target", "es2020", *(name + ".ts" for name in texts)], cwd=folder, stdout=subprocess.PIPE, text=True, timeout=300)
    errors = [line for line in p.stdout.splitlines() if re.match(r"\S", line)]
    assert p.returncode != 0 and len(errors) == 1 and errors[0].startswith("wrong.ts(") and "readynessProbe" in p.stdout, p.stdout


def containers(folder):
    """(the pod's object, the container) of all that the manifest starts."""
    with open(MANIFEST, "rb") as f:
        text = f.read()
    show = "console.log(JSON.stringify(require('js-yaml').loadAll(require('fs').readFileSync(0, 'utf8'))))"
    objects = json.loads(subprocess.run(["node", "-e", show], cwd=folder, input=text, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
    settings = next(o["data"] for o in objects if o["kind"] == "ConfigMap")
    pods = [(o, o["spec"]["template"]["spec"]) for o in objects if "template" in o.get("spec", {})]
    return settings, [(pod, c) for _, pod in pods for c in pod.get("initContainers", []) + pod["containers"]]


def test_the_daemons_accept_their_settings(folder, tmp_path):
    settings, all_of = containers(folder)
    assert [c["name"] for _, c in all_of] == PARTS
    (tmp_path / "salt").write_text("b" * 44)
    key = subprocess.run([os.path.join(BUILD, "bin", "batonctl"), "key", "add", "--file", str(tmp_path / "api-keys")], check=True,
                         stdout=subprocess.PIPE, timeout=60)
    assert key.stdout
    (tmp_path / "salt").chmod(0o440)
    for command in ["ca"], ["http", "baton"]:
        subprocess.run([os.path.join(ROOT, "deploy/local/baton-certs"), "--dir", str(tmp_path), *command], check=True,
                       stdout=subprocess.DEVNULL, timeout=60)
    for pod, c in all_of:
        if c["name"] == "etcd":
            continue
        own = {e["name"]: e.get("value", "127.0.0.1") for e in c["env"]}  # a field of the pod: its address, the node's name
        env = {k: v.replace("$(POD_IP)", "127.0.0.1").replace("/model", MODEL).replace("/secrets", str(tmp_path)).replace("/https", f"{tmp_path}/http")
               for k, v in {**settings, **own}.items()}
        p = subprocess.run([os.path.join(BUILD, "bin", c["command"][0]), "--check=values"], env={"PATH": os.environ["PATH"], **env},
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        assert p.returncode == 0 and "is ignored" not in p.stdout and "Did you mean" not in p.stdout, (c["name"], p.stdout)
        mounts = {m["mountPath"]: m["name"] for m in c["volumeMounts"]}
        assert set(mounts.values()) <= {v["name"] for v in pod["volumes"]} and {"/model", "/secrets", "/run/baton"} <= set(mounts)
        ports = [p["containerPort"] for p in c["ports"]]
        listens = [int(v.rsplit(":", 1)[1]) for k, v in env.items() if k.endswith("HTTP_LISTEN")]
        assert set(listens) <= set(ports), (c["name"], listens, ports)


def test_a_slab_fits_its_memory(folder):
    gib = {"Gi": 1, "GiB": 1}
    for pod, c in containers(folder)[1]:
        if c["name"] == "kvstore":
            slab = re.fullmatch(r"(\d+)(GiB)", next(e["value"] for e in c["env"] if e["name"] == "BATON_KVSTORE_SLAB_BYTES"))
            shm = re.fullmatch(r"(\d+)(Gi)", next(v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "shm"))
            limit = re.fullmatch(r"(\d+)(Gi)", c["resources"]["limits"]["memory"])
            sizes = [int(m[1]) * gib[m[2]] for m in (slab, shm, limit)]
            assert sizes[0] < sizes[1] <= sizes[2]
            assert pod["shareProcessNamespace"] and c["restartPolicy"] == "Always"  # a sidecar: up before its worker, down behind it

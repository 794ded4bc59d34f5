"""Clients of the Responses and Messages APIs that people have, unchanged, against a running cluster: openai (two versions),
@anthropic-ai/sdk, the AI SDK, LangChain. Without node, npm or a registry they are skipped with the reason. The packages are
installed once for each package.json, below the build folder."""
import hashlib
import os
import shutil
import subprocess

import pytest

from conftest import BUILD, wait_for

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "api-clients")
SCENARIOS = ["openai5", "openai6", "anthropic", "abort", "ai_openai", "ai_compatible", "ai_anthropic",
             "langchain_openai", "langchain_anthropic"]
INSTALL_S = 240
NODE_MIN = 20  # of LangChain


def install():
    """The folder with the packages."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on PATH; deploy/local/setup.sh --tests installs it")
    version = subprocess.run(["node", "--version"], stdout=subprocess.PIPE, check=True, timeout=30).stdout.decode()
    if int(version.strip("v\n").split(".")[0]) < NODE_MIN:
        pytest.skip(f"node {version.strip()} is older than {NODE_MIN}, which these packages need")
    with open(os.path.join(HERE, "package.json"), "rb") as f:
        name = hashlib.sha256(f.read()).hexdigest()[:16]
    folder = os.path.join(BUILD, "npm", name)
    if os.path.isdir(folder):
        return folder
    part = f"{folder}.{os.getpid()}"
    os.makedirs(part)
    shutil.copy(os.path.join(HERE, "package.json"), part)
    cmd = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--prefer-offline",
           "--fetch-retries=1", "--fetch-timeout=30000"]
    try:
        p = subprocess.run(cmd, cwd=part, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, timeout=INSTALL_S)
        why = p.stdout.decode(errors="replace").strip() if p.returncode != 0 else None
    except subprocess.TimeoutExpired:
        why = f"took longer than {INSTALL_S} s"
    if why is not None:
        shutil.rmtree(part)
        pytest.skip("npm install failed (no network?): " + why[-300:])
    os.rename(part, folder)
    return folder


@pytest.fixture(scope="module")
def results(cluster):
    """What the scenarios print: one process runs all, because loading the packages takes a second."""
    folder = install()
    script = os.path.join(folder, "client.mjs")
    shutil.copy(os.path.join(HERE, "client.mjs"), script)  # node looks for packages beside it
    gone = "baton_http_disconnects_total"
    before = cluster.metrics("conductor")[gone]
    p = subprocess.run(["node", script, cluster.url, cluster.model, *SCENARIOS], stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)
    wait_for(lambda: cluster.metrics("conductor")[gone] == before + 2, 10, "two have left in the middle of a stream")
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 2,
             "nothing is generated for nobody")
    return p.stdout.decode(errors="replace")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_client(results, scenario):
    assert f"ok {scenario}\n" in results, results

"""Clients of the Responses and Messages APIs that people have, unchanged, against a running cluster: openai (two versions),
@anthropic-ai/sdk, the AI SDK, LangChain. Without node, npm or a registry they are skipped with the reason. The packages are
installed once for each package.json, below the build folder."""
import json
import os
import shutil
import subprocess

import pytest

import npm_packages
from conftest import ROOT, Cluster, wait_for

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "api-clients")
MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m")
SCENARIOS = ["openai5", "openai6", "anthropic", "abort", "ai_openai", "ai_compatible", "ai_anthropic",
             "langchain_openai", "langchain_anthropic"]
NODE_MIN = 20  # of LangChain


def run(script, url, model, scenarios):
    """What the scenarios print: one process runs all, because loading the packages takes a second."""
    folder = npm_packages.install(HERE, NODE_MIN)
    for name in (script, "shared.mjs"):  # node looks for packages beside them
        shutil.copy(os.path.join(HERE, name), os.path.join(folder, name))
    p = subprocess.run(["node", os.path.join(folder, script), url, model, *scenarios], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, timeout=240)
    return p.stdout.decode(errors="replace")


@pytest.fixture(scope="module")
def results(cluster):
    gone = "baton_http_disconnects_total"
    before = cluster.metrics("conductor")[gone]
    out = run("client.mjs", cluster.url, cluster.model, SCENARIOS)
    wait_for(lambda: cluster.metrics("conductor")[gone] == before + 2, 60, "two have left in the middle of a stream")
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 60,
             "nothing is generated for nobody")
    return out


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_client(results, scenario):
    assert f"ok {scenario}\n" in results, results


# ---- tools and reasoning ----

TOOLS = ["chat5", "chat6", "openai5", "openai6", "anthropic", "ai_openai", "ai_compatible", "ai_anthropic",
         "langchain_openai", "langchain_anthropic"]
# The prompt is the last message alone; the null engine answers with a copy of it, up to the token that ends both.
COPIES = "{{ messages[-1].content }}{{ eos_token }}{% if tools %}{# <tool_call> <think> #}{% endif %}"


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The folder of that model."""
    npm_packages.install(HERE, NODE_MIN)
    model = tmp_path_factory.mktemp("model") / "copies"
    model.mkdir()
    for name in os.listdir(MODEL):
        os.symlink(os.path.join(MODEL, name), model / name)
    config = model / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps(dict(fields, chat_template=COPIES)))
    return str(model)


NULL = ["--nodes", "1", "--prefill", "0", "--decode", "1", "--set", "decode.engine.device=null", "--model"]


@pytest.fixture(scope="module")
def tool_results(copies):
    with pytest.MonkeyPatch.context() as m:
        m.setenv("BATON_NULL_EDIT", "1000000")
        c = Cluster(*NULL, copies)
    yield run("tools.mjs", c.url, c.model, TOOLS)
    c.stop()


@pytest.mark.parametrize("scenario", TOOLS)
def test_tools(tool_results, scenario):
    assert f"ok {scenario}\n" in tool_results, tool_results


# ---- forced calls, constrained answers ----

@pytest.fixture(scope="module")
def forced_results(copies):
    """The null engine chooses among the tokens that the grammar allows. Without reasoning, which it would never end."""
    c = Cluster(*NULL, copies, "--set", "conductor.conductor.answer_form=hermes")
    yield run("forced.mjs", c.url, c.model, FORCED)
    c.stop()


FORCED = [name for name in TOOLS if not name.startswith("chat")]


@pytest.mark.parametrize("scenario", FORCED)
def test_forced(forced_results, scenario):
    assert f"ok {scenario}\n" in forced_results, forced_results

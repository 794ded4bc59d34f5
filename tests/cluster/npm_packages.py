"""Packages of npm that tests use. Without node, npm or a registry such a test is skipped with the reason."""
import hashlib
import os
import shutil
import subprocess

import pytest

from conftest import BUILD

INSTALL_S = 240


def install(folder, node_min=0):
    """Installs what folder/package.json names, once for each content of it, below the build folder. Returns where."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on PATH; deploy/local/setup.sh --tests installs it")
    version = subprocess.run(["node", "--version"], stdout=subprocess.PIPE, check=True, timeout=30).stdout.decode()
    if int(version.strip("v\n").split(".")[0]) < node_min:
        pytest.skip(f"node {version.strip()} is older than {node_min}, which these packages need")
    with open(os.path.join(folder, "package.json"), "rb") as f:
        name = hashlib.sha256(f.read()).hexdigest()[:16]
    made = os.path.join(BUILD, "npm", name)
    if os.path.isdir(made):
        return made
    part = f"{made}.{os.getpid()}"
    os.makedirs(part)
    shutil.copy(os.path.join(folder, "package.json"), part)
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
    os.rename(part, made)
    return made

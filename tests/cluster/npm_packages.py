"""Packages of npm that tests use. Without node, npm or a registry such a test is skipped with the reason."""
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess

import pytest

from conftest import BUILD

INSTALL_S = 240


def install(folder, node_min=0):
    """Installs what folder/package.json names, once for each content of it, below the build folder. Returns where."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on PATH; deploy/local/setup.sh --tests installs it")
    version = subprocess.run(["node", "--version"], stdout=subprocess.PIPE, check=True, timeout=60).stdout.decode()
    if int(version.strip("v\n").split(".")[0]) < node_min:
        pytest.skip(f"node {version.strip()} is older than {node_min}, which these packages need")
    with open(os.path.join(folder, "package.json"), "rb") as f:
        name = hashlib.sha256(f.read()).hexdigest()[:16]
    made = os.path.join(BUILD, "npm", name)
    os.makedirs(os.path.dirname(made), exist_ok=True)
    with open(made + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of the tests may be installing the same
        if not os.path.isdir(made):
            why = fill(folder, made + ".part")
            if why is not None:
                pytest.skip("npm install failed (no network?): " + why[-300:])
            os.rename(made + ".part", made)
    return made


def fill(folder, part):
    """Why the packages could not be installed; None: they are."""
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    os.makedirs(part)
    shutil.copy(os.path.join(folder, "package.json"), part)
    cmd = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--prefer-offline",
           "--fetch-retries=1", "--fetch-timeout=30000"]
    p = subprocess.Popen(cmd, cwd=part, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         start_new_session=True)
    try:
        said = p.communicate(timeout=INSTALL_S)[0].decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)  # with its children, which would write on
        p.communicate()
        return f"took longer than {INSTALL_S} s"
    return said or f"npm ended with {p.returncode}" if p.returncode != 0 else None

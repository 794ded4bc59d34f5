"""The instrumented builds' own net: what a process reports fails the test that started it."""
import os
import re
import subprocess

import pytest

import sanitizer
from conftest import Cluster, fail_if_reported

FAULTY = os.path.join(sanitizer.BUILD, "tests", "tools", "faulty")
FINDS = {"address": {"leak": "LeakSanitizer: detected memory leaks", "overrun": "heap-buffer-overflow|insufficient space",
                     "overflow": "signed integer overflow"},
         "thread": {"race": "ThreadSanitizer: data race"}, "": {}}
pytestmark = pytest.mark.skipif(not sanitizer.KIND, reason="no instrumented build")


@pytest.mark.parametrize("what", sorted({w for found in FINDS.values() for w in found}))
def test_a_report_is_found(what):
    if what not in FINDS[sanitizer.KIND]:
        pytest.skip("another sanitizer's")
    p = subprocess.run([FAULTY, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert p.returncode == sanitizer.EXITCODE
    err = p.stderr.decode()
    if sanitizer.in_log(err):  # of the undefined behaviour sanitizer, which keeps to stderr
        assert re.search(FINDS[sanitizer.KIND][what], sanitizer.in_log(err))
    else:
        with pytest.raises(AssertionError, match=FINDS[sanitizer.KIND][what]):
            fail_if_reported()


def test_nothing_is_nothing():
    p = subprocess.run([FAULTY, "nothing"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert (p.returncode, p.stderr) == (0, b"")


@pytest.mark.skipif(sanitizer.KIND != "address", reason="leaks are the address sanitizer's")
@pytest.mark.parametrize("daemon", ["conductor", "kvstore", "prefill", "decode"])
def test_daemons_look_for_leaks_when_they_end(daemon, tmp_path):
    """A library whose constructor loses a block is loaded into one daemon of a cluster."""
    lib, names = tmp_path / "leaky.so", tmp_path / "leaky.c"
    names.write_text("""
#include <errno.h>
#include <stdlib.h>
#include <string.h>
static void *volatile lost;
__attribute__((constructor)) static void lose(void)
{
    if (strstr(program_invocation_name, "baton-%s") != NULL) {
        lost = malloc(4321);
        lost = NULL;
    }
}
""" % daemon)
    subprocess.run(["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", lib, names], check=True, timeout=60)
    runtime = re.search(r"libasan\.so\S* => (\S+)", subprocess.run(
        ["ldd", FAULTY], stdout=subprocess.PIPE, check=True, timeout=60).stdout.decode())[1]
    wrapper = tmp_path / "bin"
    wrapper.mkdir()
    for name in os.listdir(os.path.join(sanitizer.BUILD, "bin")):
        target = os.path.join(sanitizer.BUILD, "bin", name)
        script = wrapper / name
        script.write_text(f'#!/bin/sh\nexport LD_PRELOAD="{runtime} {lib}"\nexec {target} "$@"\n')
        script.chmod(0o755)
    c = Cluster("--nodes", "1", bin=str(wrapper))
    c.complete("To be", max_tokens=2)
    c.stop()
    with pytest.raises(AssertionError, match=rf"baton-{daemon}(?s:.*)4321 byte"):
        fail_if_reported()

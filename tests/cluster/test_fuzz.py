"""The fuzz targets: nothing else builds them, and each names the sources that it needs. Looking for long is by hand."""
import os
import shutil
import subprocess

import pytest

import sanitizer
from conftest import ROOT

pytestmark = [pytest.mark.skipif(shutil.which("clang") is None, reason="no clang"),
              pytest.mark.skipif(bool(sanitizer.KIND), reason="they are instrumented anyway")]


@pytest.mark.parametrize("target", ["http_parse", "front_parse", "template", "token"])
def test_a_target_builds_and_runs(target, tmp_path):
    p = subprocess.run([os.path.join(ROOT, "tests", "fuzz", "run"), target, "1", tmp_path], cwd=ROOT, timeout=400,
                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = p.stdout.decode(errors="replace")
    assert p.returncode == 0 and "\nDone " in text, text[-3000:]

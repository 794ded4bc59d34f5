"""make bundle: the archive is small enough, closed under its libraries, and serves from wherever it was unpacked."""
import os
import re
import subprocess

import pytest

import sanitizer
from conftest import BUILD, ROOT, Cluster

LIMIT = 40 << 20
# What a machine must have by itself: glibc, and for cuda plugins the driver and CUDA's libraries.
LIBC = re.compile(r"^(ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libmvec|linux-vdso)\.so")
CUDA = re.compile(r"^(libcuda|libcudart|libcublas|libcublasLt|libnccl|libnvrtc)\.so")
BARE = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def pack(*more):
    """Path of a new archive. Packed fast, so a real one is smaller."""
    if sanitizer.KIND:
        pytest.skip("instrumented builds are not bundled")
    p = subprocess.run([os.path.join(ROOT, "deploy", "bundle", "make-bundle.sh"), BUILD, "test", *more],
                       env=dict(os.environ, BUNDLE_XZ_PRESET="0"), stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=400)
    assert p.returncode == 0, p.stderr.decode()
    return p.stdout.decode().split()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The unpacked folder, under a path with a space and a Makefile beside it."""
    archive = pack()
    assert os.path.getsize(archive) <= LIMIT
    where = tmp_path_factory.mktemp("some where")
    (where / "Makefile").write_text("all:\n")
    subprocess.run(["tar", "-xf", archive, "-C", str(where)], check=True)
    os.unlink(archive)
    return os.path.join(str(where), "baton-test-" + os.uname().machine)


def elves(top):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as f:
                if f.read(4) == b"\x7fELF":
                    yield path


def test_every_library_is_inside(unpacked):
    lib = os.path.join(unpacked, "lib", "baton")
    assert os.path.exists(os.path.join(lib, "ucx", "libuct_cma.so.0"))
    seen = 0
    for path in elves(unpacked):
        # An executable's RPATH serves the libraries that it loads; asked alone they need the path.
        env = dict(BARE) if "/bin/" in path[len(unpacked):] else dict(BARE, LD_LIBRARY_PATH=lib)
        out = subprocess.run(["ldd", path], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             timeout=120).stdout.decode()
        for line in out.splitlines():
            name = os.path.basename(line.split()[0])
            if LIBC.match(name) or CUDA.match(name) or "statically linked" in line:
                continue
            assert f"=> {unpacked}/" in line, f"{path} takes {line.strip()} from elsewhere"
            seen += 1
    assert seen > 100, seen


def test_the_readme_names_what_is_there(unpacked):
    with open(os.path.join(unpacked, "README.md")) as f:
        text = f.read()
    with open(os.path.join(BUILD, "version")) as f:
        assert text.startswith(f"# Baton {f.read().strip()}\n")
    named = set(re.findall(r"(?<![\w/])(?:bin|lib|share)(?:/[\w.-]+)*", text))
    assert {"bin/baton-local", "share/baton/systemd/install.sh", "share/doc/baton/UPGRADING.md"} <= named
    assert all(os.path.exists(os.path.join(unpacked, p)) for p in named), named
    helper = os.path.join(unpacked, "lib", "baton", "bench", "baton-bench-grammar")
    p = subprocess.run([helper, "--help"], env=BARE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert p.returncode == 0 and b"usage" in p.stdout, p.stdout  # it finds its libraries beside its folder


def test_it_serves_from_where_it_lies(unpacked, tmp_path):
    local, state = os.path.join(unpacked, "bin", "baton-local"), str(tmp_path / "state")

    def call(*args):
        return subprocess.run([local, *args, "--dir", state], env=BARE, cwd="/", stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=240)

    p = call("up", "--port", "0")
    assert p.returncode == 0, p.stderr.decode()
    c = Cluster.__new__(Cluster)
    c.ready = {}
    c.state_dir, c.url = state, p.stdout.decode().split()[-1]
    c.host, port = c.url[len("http://"):].split(":")
    c.port = int(port)
    try:
        assert c.get("/v1/models")["data"][0]["id"] == "shakespeare-llama-6m"
        answer = c.complete("ROMEO:\n", 24)
        assert answer["usage"]["completion_tokens"] == 24 and answer["choices"][0]["text"].strip()
        for d in c.status():
            assert os.readlink(f"/proc/{d['pid']}/exe").startswith(unpacked + "/"), d
            with open(f"/proc/{d['pid']}/maps") as f:
                mapped = {m[1] for m in re.finditer(r" (/.*\.so[.0-9]*)$", f.read(), re.M)}
            strange = {m for m in mapped if not m.startswith(unpacked + "/")
                       and not LIBC.match(os.path.basename(m)) and "/libnss" not in m}
            assert not strange, (d["daemon"], strange)
            if d["daemon"] == "decode":
                assert any(m.endswith("baton-engine-cpu.so") for m in mapped), mapped
    finally:
        p = call("down")
    assert p.returncode == 0, p.stderr.decode()


def test_for_gpu_machines_without_onednn():
    archive = pack("gpu")
    names = subprocess.run(["tar", "-tf", archive], check=True, stdout=subprocess.PIPE).stdout.decode()
    size = os.path.getsize(archive)
    os.unlink(archive)
    assert "baton-engine-null.so" in names and "bin/baton-decode" in names
    assert "dnnl" not in names and "baton-engine-cpu" not in names and "libgomp" not in names
    assert size <= LIMIT, size

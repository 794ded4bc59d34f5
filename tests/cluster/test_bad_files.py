"""Bad model files, configuration and command lines against the real binaries: they end by themselves,
with an exit code and a message that names the thing and the remedy, and without a trace in /dev/shm.

The readers have tables of their own (test_model.c, test_token.c, test_conf.c); here it is about what a
daemon makes of them, so there is one case for each kind of mistake. Nothing here needs etcd.
"""
import glob
import json
import os
import re
import shutil
import socket
import struct
import subprocess

import pytest

from conftest import BUILD, CTL, ROOT

MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m")
# A mistake on the command line or in the configuration; a model that cannot be served (systemd restarts after
# neither); what may be better at the next try.
USAGE, MODEL_REFUSED, START = (2,), (3,), (1, 2)


def run(daemon, *args, sets=None, seconds=60, environ=None):
    """Runs a daemon that is to end by itself; returns (exit code, stderr and stdout as text)."""
    argv = [os.path.join(BUILD, "bin", daemon), *args]
    for k, v in (sets or {}).items():
        argv += ["--set", f"{k}={v}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    env.update(environ or {})
    p = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, timeout=seconds)
    return p.returncode, p.stdout.decode(errors="strict")


def errors(text):
    """The lines that complain: of the log with level error, or all of them before there is a log."""
    lines = text.splitlines()
    logged = [x for x in lines if "level=error" in x]
    return "\n".join(logged or [x for x in lines if "level=" not in x])


def refuse(codes, words, daemon, *args, **kw):
    rc, text = run(daemon, *args, **kw)
    assert rc in codes, (rc, text[-3000:])
    said = errors(text)
    for word in words:
        assert re.search(word, said), f"no /{word}/ in: {text[-3000:]}"
    assert not re.search(r"AddressSanitizer|runtime error|Assertion|BUG", text), text[-5000:]


def base(tmp_path, daemon, **more):
    os.makedirs(tmp_path / "run", exist_ok=True)
    sets = {"node.id": "n1", "cluster.name": f"bad{os.getpid()}", "run_dir": tmp_path / "run", "model.path": MODEL,
            "kv.block_tokens": 16, "etcd.endpoints": "127.0.0.1:9"}
    if daemon == "baton-conductor":
        sets["conductor.http.listen"] = "127.0.0.1:0"
    elif daemon == "baton-kvstore":
        sets["kvstore.slab_bytes"] = "16MiB"
    else:
        sets.update({"engine.device": "cpu", "engine.threads": 1, "engine.pages": 64})
    sets.update({k.replace("__", "."): v for k, v in more.items()})
    return sets


# ---- model files ----

def edit(name):
    """A case's function gets the JSON of a file and changes it."""
    def wrap(fn):
        def apply(folder):
            path = folder / name
            with open(path) as f:
                j = json.load(f)
            out = fn(j)
            path.unlink()
            path.write_text(json.dumps(j if out is None else out))
        return apply
    return wrap


def text(name, content):
    def apply(folder):
        if (folder / name).exists() or (folder / name).is_symlink():
            (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return apply


def config(**fields):
    return edit("config.json")(lambda j: j.update(fields))


def without(name, key):
    return edit(name)(lambda j: {k: v for k, v in j.items() if k != key})


def weights(change):
    """Rewrites model.safetensors through its header (a dict) and data (bytes)."""
    def apply(folder):
        raw = (folder / "model.safetensors").read_bytes()
        n = struct.unpack("<Q", raw[:8])[0]
        header, data = json.loads(raw[8:8 + n]), raw[8 + n:]
        out = change(header, data)
        if isinstance(out, tuple):
            header, data = out
        (folder / "model.safetensors").unlink()
        if isinstance(out, bytes):
            (folder / "model.safetensors").write_bytes(out)
            return
        h = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(h)) + h + data)
    return apply


def first(header):
    return min((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][0])


def shape_swapped(header, _):
    t = header["model.layers.0.mlp.down_proj.weight"]
    t["shape"] = t["shape"][::-1]


def one_more(header, data):
    """A bias that this architecture has not: another model's weights."""
    return {**header, "model.layers.1.self_attn.q_proj.bias":
            {"dtype": "BF16", "shape": [256], "data_offsets": [len(data), len(data) + 512]}}, data + bytes(512)


def overlap(header, _):
    header[first(header)]["data_offsets"][1] += 2
    header[first(header)]["shape"] = [header[first(header)]["data_offsets"][1] // 2]


def index(content):
    def apply(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)
    return apply


def both(a, b):
    def apply(folder):
        a(folder)
        b(folder)
    return apply


ENGINE, FRONT, ALL = ["baton-prefill"], ["baton-conductor"], ["baton-prefill", "baton-conductor", "baton-kvstore"]
MODEL_CASES = {
    # config.json
    "no-config": (ALL, text("config.json", None), [r"config\.json", "No such file"]),
    "config-cut": (ALL, text("config.json", '{"architectures": ['), [r"config\.json", "JSON"]),
    "config-empty": (ALL, text("config.json", ""), [r"config\.json"]),
    "config-field-missing": (ALL, without("config.json", "num_hidden_layers"), [r"config\.json", "num_hidden_layers"]),
    "config-heads": (ALL, config(num_attention_heads=3, num_key_value_heads=2), [r"config\.json", "heads"]),
    "config-zero-layers": (ALL, config(num_hidden_layers=0), ["num_hidden_layers"]),
    "config-absurd": (ALL, config(hidden_size=10**18), [r"config\.json", "hidden_size"]),
    "config-negative": (ALL, config(vocab_size=-5), ["vocab_size"]),
    "config-string": (ALL, config(hidden_size="128"), ["hidden_size"]),
    "config-architecture": (ALL, config(architectures=["T5Model"]), ["T5Model", "LlamaForCausalLM"]),
    "config-quantized": (ALL, config(quantization_config={"bits": 4}), ["quantization_config"]),
    "config-more-layers": (ENGINE, config(num_hidden_layers=60), [r"layers\.\d+\.", "safetensors|tensor"]),
    # weights
    "no-weights": (ENGINE, text("model.safetensors", None), [r"model\.safetensors", "no such file", r"index\.json"]),
    "weights-7-bytes": (ENGINE, text("model.safetensors", b"1234567"), ["7 bytes", "cut off"]),
    "weights-header-long": (ENGINE, text("model.safetensors", struct.pack("<Q", 1 << 40) + b"{}"), ["header"]),
    "weights-header-2^63": (ENGINE, text("model.safetensors", b"\xff" * 8 + b"{}"), ["header"]),
    "weights-header-no-json": (ENGINE, text("model.safetensors", struct.pack("<Q", 4) + b"{\xff\x00}"), ["header", "JSON"]),
    "weights-pickle": (ENGINE, text("model.safetensors", b"\x80\x02}q\x00(X\x01\x00\x00\x00a" * 10), ["header"]),
    "weights-cut": (ENGINE, weights(lambda h, d: (h, d[:-1000])), [r"tensor \S+:", "data_offsets end at"]),
    "weights-trailing": (ENGINE, weights(lambda h, d: (h, d + b"x" * 16)), ["behind the last"]),
    "weights-dtype": (ENGINE, weights(lambda h, d: h[first(h)].update(dtype="Q4_K")), ["Q4_K"]),
    "weights-dtype-int": (ENGINE, weights(lambda h, d: h[first(h)].update(dtype="I16")), ["I16"]),
    "weights-shape": (ENGINE, weights(shape_swapped), [r"down_proj", "shape"]),
    "weights-missing": (ENGINE, weights(lambda h, d: h.update({"model.other.weight": h.pop("model.norm.weight")})),
                        [r"model\.norm\.weight"]),
    "weights-more": (ENGINE, weights(one_more), [r"layers\.1\.self_attn\.q_proj\.bias", "has no such tensor"]),
    "weights-overlap": (ENGINE, weights(overlap), ["overlap"]),
    "weights-overflow": (ENGINE, weights(lambda h, d: h[first(h)].update(shape=[1 << 62, 1 << 62])), ["overflow"]),
    "weights-nan-offset": (ENGINE, weights(lambda h, d: h[first(h)].update(data_offsets=[0, 1e308])), ["data_offsets"]),
    "index-outside": (ENGINE, index(json.dumps({"weight_map": {"a": "../../../../etc/passwd"}})), [r"weight_map\.a", "same directory"]),
    "index-shard-missing": (ENGINE, index(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})),
                            ["model-00001-of-00002"]),
    "index-no-json": (ENGINE, index("<html>rate limited</html>"), [r"index\.json", "JSON"]),
    "index-empty": (ENGINE, index("{}"), [r"index\.json", "weight_map"]),
    # tokenizer and its companions
    "no-tokenizer": (FRONT, text("tokenizer.json", None), [r"tokenizer\.json", "No such file"]),
    "tokenizer-html": (FRONT + ENGINE, text("tokenizer.json", "<html>"), [r"tokenizer\.json"]),
    "tokenizer-merge": (FRONT, edit("tokenizer.json")(lambda j: j["model"]["merges"].append(["qqq", "zzz"])),
                        ["merges", "qqq"]),
    "tokenizer-vocab": (FRONT, both(config(vocab_size=300, bos_token_id=1, eos_token_id=2),
                                    text("generation_config.json", None)), [r"tokenizer", "vocab_size", "300"]),
    "tokenizer-kind": (FRONT, edit("tokenizer.json")(lambda j: j["model"].update(type="Unigram")), ["Unigram"]),
    "template-filter": (FRONT, edit("tokenizer_config.json")(lambda j: j.update(chat_template="a\n{{ x|nosuch }}")),
                        ["nosuch", "line 2"]),
    "template-cut": (FRONT, edit("tokenizer_config.json")(lambda j: j.update(chat_template="{% for m in x %}")),
                     ["endfor", "line 1"]),
    "generation-no-json": (FRONT, text("generation_config.json", "{"), [r"generation_config\.json"]),
    "generation-type": (FRONT, text("generation_config.json", '{"temperature": "hot"}'),
                        [r"generation_config\.json", "temperature"]),
    "generation-range": (FRONT, text("generation_config.json", '{"top_p": 7}'), [r"generation_config\.json", "top_p"]),
}


@pytest.mark.parametrize("daemon,case", [(d, c) for c, v in MODEL_CASES.items() for d in v[0]])
def test_model_files(tmp_path, daemon, case):
    _, change, words = MODEL_CASES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    for name in os.listdir(MODEL):
        (folder / name).symlink_to(os.path.join(MODEL, name))
    change(folder)
    before = set(os.listdir("/dev/shm"))
    refuse(MODEL_REFUSED, words, daemon, sets=base(tmp_path, daemon, model__path=folder))
    mine = [f for f in set(os.listdir("/dev/shm")) - before if f"bad{os.getpid()}" in f]
    assert mine == []


@pytest.mark.parametrize("daemon", ALL)
@pytest.mark.parametrize("path,words", [("/nonexistent", ["/nonexistent", r"model\.path|model directory"]),
                                        ("/etc/passwd", ["/etc/passwd"])])
def test_model_path(tmp_path, daemon, path, words):
    refuse(MODEL_REFUSED + START, words, daemon, sets=base(tmp_path, daemon, model__path=path))


# ---- configuration and command line ----

@pytest.mark.parametrize("daemon", ["baton-conductor", "baton-kvstore", "baton-prefill", "baton-decode"])
def test_command_line(tmp_path, daemon):
    good = base(tmp_path, daemon)
    assert run(daemon, "--check", sets=good)[0] == 0
    refuse(USAGE, ["unknown option --frobnicate", "--help"], daemon, "--frobnicate")
    refuse(USAGE, ["value is missing after --set"], daemon, "--set")
    refuse(USAGE, ["value is missing after --config"], daemon, "--config")
    refuse(USAGE, ["KEY=VALUE"], daemon, "--set", "kv.block_tokens")
    refuse(USAGE, [r"unknown key kv\.blocktokens, did you mean kv\.block_tokens"], daemon,
           sets=dict(good, **{"kv.blocktokens": 4}))
    refuse(USAGE, ["48 is not a power of two"], daemon, sets=dict(good, **{"kv.block_tokens": 48}))
    refuse(USAGE, [r"node\.id is required"], daemon, "--check")
    for bad in ("127.0.0.1:65536", "localhost", "[::1", "127.0.0.1:"):
        refuse(USAGE, [r"rpc\.listen", "host:port"], daemon, "--check", sets=dict(good, **{"rpc.listen": bad}))
    refuse(USAGE, [r"etcd\.endpoints"], daemon, "--check", sets=dict(good, **{"etcd.endpoints": "http://h:1"}))


def test_check_reads_the_wire_addresses(tmp_path):
    """What no machine could listen on is refused before a start; what only this one has not is not."""
    good = base(tmp_path, "baton-kvstore")
    for bad, words in (("eth0", "numeric address"), ("10.0.0.1:7000", "without port 7000"), ("", "0 addresses"),
                       ("8.8.8.8", r"kvstore\.wire\.allow_routable"), ("0.0.0.0", "routable"),
                       (",".join(f"10.0.0.{i}" for i in range(1, 10)), "9 addresses")):
        refuse(USAGE, [r"kvstore\.wire\.listen", words], "baton-kvstore", "--check",
               sets=dict(good, **{"kvstore.wire.listen": bad}))
    for fine in ({"kvstore.wire.listen": "10.0.0.1,fd00::7"},
                 {"kvstore.wire.listen": "8.8.8.8", "kvstore.wire.allow_routable": "true"},
                 {"kvstore.wire.listen": "10.0.0.1:7000", "kvstore.wire.transport": "grpc"}):
        assert run("baton-kvstore", "--check=values", sets=dict(good, **fine))[0] == 0
        refuse(USAGE, [r"kvstore\.wire\.listen", "this host cannot listen on"], "baton-kvstore", "--check", sets=dict(good, **fine))


@pytest.mark.parametrize("daemon", ["baton-conductor", "baton-kvstore", "baton-prefill", "baton-decode"])
def test_check_looks_at_this_host(tmp_path, daemon):
    """Addresses, directories and the model are looked at by --check, and not by --check=values."""
    good = base(tmp_path, daemon)
    empty = tmp_path / "empty"
    empty.mkdir()
    faults = [({"rpc.listen": "192.0.2.1:7000"}, [r"rpc\.listen", "this host cannot listen on"]),
              ({"http.listen": "nowhere.invalid:7000"}, [r"http\.listen", "cannot be resolved"]),
              ({"model.path": str(tmp_path / "none")}, [r"model\.path", "No such file"]),
              ({"model.path": str(empty)}, [r"config\.json"])]
    if daemon == "baton-kvstore":
        faults += [({"kvstore.slab_path": "/nonexistent/slab"}, [r"kvstore\.slab_path", "/nonexistent"]),
                   ({"kvstore.ssd.path": "/nonexistent/ssd", "kvstore.ssd.bytes": "1GiB"}, [r"kvstore\.ssd\.path", "/nonexistent"])]
    cert, key = tmp_path / "crt", tmp_path / "key"
    for f in (cert, key):
        f.write_text("text")
    key.chmod(0o644)
    tls = {"cluster.tls.ca": cert, "cluster.tls.cert": cert, "cluster.tls.key": key}
    faults += [(tls, [r"cluster\.tls\.key: .*open to everybody", "chmod 0600"]),
               (dict(tls, **{"cluster.tls.ca": "/nonexistent/ca"}), [r"cluster\.tls\.ca: /nonexistent/ca: it cannot be read: No such"]),
               (dict(tls, **{"cluster.tls.cert": tmp_path}), [r"cluster\.tls\.cert: .*it is a directory"])]
    for sets, words in faults:
        refuse(USAGE, words, daemon, "--check", sets=dict(good, **sets))
        assert run(daemon, "--check=values", sets=dict(good, **sets))[0] == 0, sets


@pytest.mark.parametrize("daemon", ["baton-conductor", "baton-kvstore", "baton-prefill"])
def test_a_port_that_is_taken_is_named(tmp_path, daemon):
    """The last line has the key, the address, the cause and the remedy."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        at = f"127.0.0.1:{s.getsockname()[1]}"
        for key in ("rpc.listen", "conductor.http.listen" if daemon == "baton-conductor" else "http.listen"):
            rc, text_ = run(daemon, sets=dict(base(tmp_path, daemon), **{key: at}))
            last = [x for x in text_.splitlines() if "level=error" in x][-1]
            assert rc in START and key in last and "Address already in use" in last and "give another port" in last, text_
            assert at in text_


def test_a_file_that_cannot_be_read_is_the_only_complaint(tmp_path):
    """What is required may stand in the part that was not read."""
    bad = tmp_path / "c.yaml"
    bad.write_text("node:\n\tid: n1\n")
    for path in (bad, tmp_path):
        rc, text_ = run("baton-decode", "--config", str(path))
        assert rc == 2 and "is required" not in text_ and len(text_.splitlines()) == 1, text_
    rc, text_ = run("baton-decode")
    assert rc == 2 and "there is no /etc/baton/decode.yaml, and --config names none" in text_, text_


def one_map(text):
    """Keys of a YAML mapping in block form; fails where a key stands twice in one map."""
    keys, open_ = set(), []
    for line in text.splitlines():
        body = line.lstrip()
        if not body or body.startswith("#"):
            continue
        name, colon, _ = body.partition(":")
        assert colon and re.fullmatch(r"[a-z0-9_]+", name), line
        indent = len(line) - len(body)
        open_ = [o for o in open_ if o[0] < indent] + [(indent, name)]
        path = ".".join(n for _, n in open_)
        assert path not in keys, f"{path} stands twice"
        keys.add(path)
    return keys


@pytest.mark.parametrize("daemon", ["baton-conductor", "baton-kvstore", "baton-prefill", "baton-decode"])
def test_printed_texts(tmp_path, daemon):
    """The example is one YAML map, also with every key in use, and it is read; help fits 80 columns."""
    p = subprocess.run([os.path.join(BUILD, "bin", daemon), "--print-example"], stdout=subprocess.PIPE, timeout=60)
    text = p.stdout.decode()
    assert "model" in one_map(text)
    every = re.sub(r"^( *)# ([a-z0-9_]+:( |$))", r"\1\2", text, flags=re.M)
    assert {"cluster.name", "cluster.tls.ca", "node.id", "kv.block_tokens"} <= one_map(every)
    path = tmp_path / "example.yaml"
    path.write_text(text.replace("  id: \n", "  id: n1\n").replace("  path: \n", f"  path: {MODEL}\n"))
    assert run(daemon, "--check", "--config", str(path))[0] == 0
    p = subprocess.run([os.path.join(BUILD, "bin", daemon), "--help"], stdout=subprocess.PIPE, timeout=60)
    assert not [line for line in p.stdout.decode().splitlines() if len(line) > 80]


@pytest.mark.parametrize("daemon", ["baton-conductor", "baton-kvstore", "baton-prefill", "baton-decode"])
def test_configuration_file(tmp_path, daemon):
    def with_file(content, words):
        path = tmp_path / "c.yaml"
        path.write_bytes(content)
        refuse(USAGE, words, daemon, "--check", "--config", str(path), sets=base(tmp_path, daemon))

    refuse(USAGE, ["/nonexistent.yaml", "No such file"], daemon, "--config", "/nonexistent.yaml")
    refuse(USAGE, ["is a directory"], daemon, "--config", str(tmp_path))
    with_file(b"kv:\n  block_token: 16\n", [r"c\.yaml:2: unknown key kv\.block_token, did you mean"])
    with_file(b"kv:\n  block_tokens: [16]\n", [r"c\.yaml:2: kv\.block_tokens: this key needs one value"])
    with_file(b"log: {level: info}\nlog: {level: info}\n", [r"c\.yaml:2: log\.level is given twice"])
    with_file(b"a: &a [x]\nb: [*a, *a]\n", [r"c\.yaml:1: unknown key a"])
    with_file(b"log: {level: *a}\n", [r"c\.yaml:1: anchors and aliases"])
    with_file(b"log: {level: \x00}\n", ["not valid YAML"])
    with_file(b"\x1b]0;pwned\x07: 1\n", ["not valid YAML"])
    with_file(b"{" * 100000, [r"c\.yaml:1: "])
    with_file(b"#" * (1 << 21), ["larger than 1 MiB"])


def test_unreadable_configuration(tmp_path):
    if os.getuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "c.yaml"
    path.write_text("log: {level: info}\n")
    path.chmod(0)
    refuse(USAGE, ["Permission denied"], "baton-kvstore", "--config", str(path))


@pytest.mark.parametrize("daemon,key,codes", [
    ("baton-conductor", "conductor.http.listen", START), ("baton-conductor", "rpc.listen", START),
    ("baton-kvstore", "rpc.listen", START), ("baton-kvstore", "http.listen", START),
    ("baton-prefill", "rpc.listen", START), ("baton-decode", "http.listen", START)])
def test_port_in_use(tmp_path, daemon, key, codes):
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    s.listen()
    address = f"127.0.0.1:{s.getsockname()[1]}"
    try:
        refuse(codes, [key, address], daemon, sets=dict(base(tmp_path, daemon), **{key: address}))
    finally:
        s.close()


@pytest.mark.parametrize("daemon", ["baton-conductor", "baton-kvstore", "baton-prefill", "baton-decode"])
def test_secret_file(tmp_path, daemon):
    empty, open_one = tmp_path / "empty", tmp_path / "open"
    empty.write_text("\n")
    open_one.write_text("secret")
    open_one.chmod(0o644)
    for bad, word in (("/nonexistent", "No such file"), (tmp_path, "it is a directory"), (empty, "1 to 4096 bytes"),
                      (open_one, "chmod")):
        refuse(USAGE, [r"kv\.salt_file", str(bad), word], daemon, sets=base(tmp_path, daemon, kv__salt_file=bad))


@pytest.mark.parametrize("tls", ["sm", "self", "^tcp", "bogus"])
def test_transports_that_reach_no_other_host(tmp_path, tls):
    """With these UCX starts, or not, but no connection between kvstores could ever be made."""
    words = ["UCX finds no transport on interface lo"] if tls == "bogus" else [re.escape(f"UCX_TLS={tls} "), "add tcp"]
    refuse(START, words, "baton-kvstore", sets=base(tmp_path, "baton-kvstore"), environ={"UCX_TLS": tls})


def test_etcd_that_is_not_there(tmp_path):
    """Whoever looks at the end of the log reads what a daemon waits for."""
    argv = [os.path.join(BUILD, "bin", "baton-conductor")]
    for k, v in base(tmp_path, "baton-conductor").items():
        argv += ["--set", f"{k}={v}"]
    p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen = b""
    try:
        while b"ev=etcd_waiting" not in seen:  # 10 s
            line = p.stdout.readline()
            assert line, seen
            seen += line
    finally:
        p.terminate()
        p.communicate(timeout=60)
    assert re.search(rb"etcd_waiting seconds=\d\d endpoint=127.0.0.1:9 .*remedy=\"waiting for etcd: start it, or correct etcd.endpoints", seen), seen


def test_batonctl_trusts_only_its_own_state_directory(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "conductor.addr").write_text("127.0.0.1:9\n")
    link = tmp_path / "link"
    link.symlink_to(other)
    for state, mode, says in ((link, 0o700, "is not used"), (other, 0o777, "is not used"), (other, 0o700, "127.0.0.1:9"),
                              (tmp_path / "none", None, "No such file")):
        if mode is not None:
            other.chmod(mode)
        rc, text_ = run("batonctl", "--dir", str(state), "status")
        assert rc == 1 and says in text_, (state, mode, text_)


@pytest.mark.parametrize("args", [(), ("--check",)])
def test_api_keys_file(tmp_path, args):
    bad_terms, nul = tmp_path / "terms", tmp_path / "nul"
    bad_terms.write_text("# keys\nsk-1\nsk-2 rps=fast\n")
    nul.write_bytes(b"\xef\xbb\xbfsk-1\nsk\0-2\n")  # a byte-order mark is no part of a key, and no mistake
    for f in (bad_terms, nul):
        f.chmod(0o600)
    for bad, says in (("/nonexistent", "No such file"), (tmp_path, "it is a directory"), (bad_terms, ":3: rps=fast: give a number"),
                      (nul, ":2: a key contains a NUL character")):
        refuse(USAGE, [r"conductor\.api_keys_file: " + re.escape(str(bad)), says], "baton-conductor", *args,
               sets=base(tmp_path, "baton-conductor", conductor__api_keys_file=bad))


@pytest.mark.parametrize("daemon", ["baton-conductor", "baton-kvstore", "baton-prefill"])
def test_a_pipe_in_place_of_a_file(tmp_path, daemon):
    """Refused at once: who opened it would wait for its writer for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    says = [re.escape(str(pipe)) + ": .*it is a pipe, a socket or a device"]
    refuse(USAGE, says, daemon, "--config", pipe)
    tls = {f"cluster.tls.{name}": pipe for name in ("ca", "cert", "key")}
    refuse(USAGE, says, daemon, "--check", sets=dict(base(tmp_path, daemon), **tls))
    if daemon == "baton-conductor":
        refuse(USAGE, says, daemon, "--check", sets=base(tmp_path, daemon, conductor__api_keys_file=pipe))
        key = subprocess.run([CTL, "--addr", "127.0.0.1:1", "--key-file", pipe, "nodes"], stderr=subprocess.PIPE, timeout=60)
        assert key.returncode == 1 and b"it is a pipe" in key.stderr
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    refuse(USAGE, ["config.json: it is a pipe"], daemon, "--check", sets=dict(base(tmp_path, daemon), **{"model.path": model}))


def test_run_dir(tmp_path):
    sets = base(tmp_path, "baton-kvstore", run_dir="/proc/nothing")
    refuse(START, ["/proc/nothing"], "baton-kvstore", sets=sets)


@pytest.fixture
def full(tmp_path):
    """A folder whose file system has no room for another file."""
    folder = tmp_path / "full"
    folder.mkdir()
    p = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=2,mode=0700", "tmpfs", folder],
                       stderr=subprocess.PIPE, text=True)
    if p.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {p.stderr.strip()}")
    (folder / "run").mkdir()
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_file_systems(tmp_path, full):
    """Where there is no room for a file, the kvstore says so, and not that the folder might be missing."""
    words = [r"No space left on device", r"make room there"]
    refuse(START, words + [str(full / "run")], "baton-kvstore", sets=base(tmp_path, "baton-kvstore", run_dir=full / "run"))
    refuse(START, words + [str(full / "slab")], "baton-kvstore", sets=base(tmp_path, "baton-kvstore", kvstore__slab_path=full / "slab"))
    (full / "run").rmdir()
    refuse(START, [r"no room for the slab", r"Lower kvstore\.slab_bytes"], "baton-kvstore",
           sets=base(tmp_path, "baton-kvstore", kvstore__slab_path=full / "slab"))
    assert not list(full.iterdir())


def test_directories_of_others_are_refused(tmp_path):
    """A kvstore trusts what lies in its directories, and removes what it does not know: they must be its own."""
    target, link, wide, foreign = (tmp_path / n for n in ("target", "link", "wide", "foreign"))
    for d in (target, wide, foreign):
        d.mkdir(mode=0o700)
    (target / "kept").write_text("kept")
    (target / "OPTIONS-000001.dbtmp").write_text("kept")
    link.symlink_to(target)
    wide.chmod(0o770)
    cases = [(link, [r"symbolic link", str(target)]), (f"{link}/", ["symbolic link"]), (wide, ["mode 0770", "chmod go-w"])]
    if os.getuid() == 0:
        os.chown(foreign, 12345, -1)
        cases.append((foreign, ["belongs to user 12345", "chown"]))
    for path, words in cases:
        for check in ((), ("--check",)):
            refuse(START + USAGE, [re.escape(f"run_dir{':' if check else ''} {path}")] + words, "baton-kvstore", *check,
                   sets=base(tmp_path, "baton-kvstore", run_dir=path))
            sets = base(tmp_path, "baton-kvstore", **{"kvstore.ssd.path": path, "kvstore.ssd.bytes": "64MiB"})
            refuse(START + USAGE, [re.escape(f"kvstore.ssd.path: {path}")] + words, "baton-kvstore", *check, sets=sets)
    ssd = tmp_path / "ssd"
    ssd.mkdir(mode=0o700)
    (ssd / "index").symlink_to(target)
    sets = base(tmp_path, "baton-kvstore", **{"kvstore.ssd.path": ssd, "kvstore.ssd.bytes": "64MiB"})
    refuse(START, [r"the index \S+/ssd/index is left as it is: it is a symbolic link"], "baton-kvstore", sets=sets)
    assert sorted(os.listdir(target)) == ["OPTIONS-000001.dbtmp", "kept"]


@pytest.mark.parametrize("program", ["baton-conductor", "baton-kvstore", "baton-prefill", "baton-decode", "batonctl",
                                     "baton-sim", "baton-bench", "baton-local", "baton-certs"])
def test_help_and_version(program):
    script = os.path.join(ROOT, "deploy", "local", program)
    path = script if os.path.exists(script) else os.path.join(BUILD, "bin", program)
    with open(os.path.join(ROOT, "deploy", "VERSION")) as f:
        release = re.escape(f.read().strip())
    with open(os.path.join(ROOT, "docs", "CHANGELOG.md")) as f:
        assert re.search(rf"^## {release} ", f.read(), re.M)
    assert re.fullmatch(rf"{program} {release} \((unknown|[0-9a-f]+(-dirty)?)\)\n", run(path, "--version")[1])
    rc, text = run(path, "--help")
    assert rc == 0 and len(text) > 200


def commands():
    """Every program that people start, and the parts of those that have help of their own."""
    found = sorted(glob.glob(os.path.join(BUILD, "bin", "*")) + glob.glob(os.path.join(ROOT, "deploy/local/baton-*")))
    parts = {"baton-bench": ["serve", "kv"], "baton-sim": ["run", "plan", "cache"], "batonctl": ["status", "pin"],
             "baton-local": ["up", "down", "status"]}
    return [" ".join([f] + sub) for f in found for sub in [[]] + [[p] for p in parts.get(os.path.basename(f), [])]]


@pytest.mark.parametrize("command", commands())
def test_help_fits_a_terminal(command):
    """80 columns, also where the terminal is wider."""
    p = subprocess.run([*command.split(), "--help"], stdout=subprocess.PIPE, text=True, timeout=60, check=True,
                       env=dict(os.environ, COLUMNS="300"))
    assert len(p.stdout.splitlines()) > 5
    assert [line for line in p.stdout.splitlines() if len(line) > 80] == []


def test_batonctl():
    refuse(USAGE, ["usage"], "batonctl")
    refuse(USAGE, ["unknown command: frob"], "batonctl", "frob")
    refuse(USAGE, ["--addr needs HOST:PORT"], "batonctl", "status", "--addr")
    refuse(USAGE, ["-o needs json"], "batonctl", "status", "-o", "xml")
    refuse((1,), ["127.0.0.1:9", "check that the conductor runs"], "batonctl", "--addr", "127.0.0.1:9", "status")


def test_local_usage(tmp_path):
    local = os.path.join(ROOT, "deploy", "local", "baton-local")

    def bad(words, *args):
        p = subprocess.run([local, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           timeout=30, env=dict(os.environ, BATON_BIN=os.path.join(BUILD, "bin")))
        said = p.stdout.decode()
        assert p.returncode == 2, (p.returncode, said)
        for w in words:
            assert re.search(w, said), said

    state = ["--dir", str(tmp_path / "state")]
    bad(["usage"])
    bad(["unknown command"], "frob")
    bad(["--nodes", "1 to 64"], "up", "--nodes", "0", *state)
    bad(["--port", "65535"], "up", "--port", "65536", *state)
    bad(["value is missing after --model"], "up", "--model")
    bad(["--device", "auto, cpu or cuda"], "up", "--device", "tpu", *state)


def test_memory_limit_below_the_slab(tmp_path):
    """A control group's limit below the slab's size is said before memory is reserved (here it never is: no such folder)."""
    limits = "mount -t tmpfs t /sys/fs/cgroup && echo 4194304 > /sys/fs/cgroup/memory.max && "
    inside = ["unshare", "-r", "-m", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run(inside + [limits + "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("no mount namespaces here")
    argv = [os.path.join(BUILD, "bin", "baton-kvstore")]
    for k, v in base(tmp_path, "baton-kvstore", kvstore__slab_path=tmp_path / "none" / "slab").items():
        argv += ["--set", f"{k}={v}"]
    p = subprocess.run(inside + [limits + 'exec "$@"', "sh", *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, timeout=60)
    said = p.stdout.decode()
    assert p.returncode == 1 and said.index("ev=memory_limit") < said.index("cannot create the slab"), said
    assert re.search(r"level=warn .* ev=memory_limit .*16777216 .* 4194304 bytes .*Raise the limit", said), said

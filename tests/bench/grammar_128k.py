#!/usr/bin/python3
"""baton-bench grammar with a vocabulary of 128,256 tokens on 400 random schemas (tests/cluster/schema_cases.py), whose
documents python3-jsonschema judges. The vocabulary is trained once (vocab.py, some minutes) and kept in
BUILD/bench/vocab. Usage: grammar_128k.py [SCHEMAS [SEED]]"""
import json
import os
import random
import subprocess
import sys
import tempfile

import jsonschema

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
from schema_cases import Documents, Schemas, for_python  # noqa: E402


def main():
    schemas, seed = (int(x) for x in (sys.argv[1:] + ["400", "1"][len(sys.argv) - 1:]))
    vocab = os.path.join(ROOT, os.environ.get("BUILD", "build"), "bench", "vocab")
    if not os.path.exists(os.path.join(vocab, "tokenizer.json")):
        subprocess.run([sys.executable, os.path.join(HERE, "vocab.py"), vocab], check=True)
    rng = random.Random(seed)
    make = Schemas(rng)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(schemas):
            schema = make.whole()
            validator = jsonschema.Draft202012Validator(for_python(schema), format_checker=jsonschema.FormatChecker())
            docs = Documents(rng, schema.get("$defs", {}))
            values = [docs.make(schema) for _ in range(8)]
            case = {"schema": schema, "tests": [{"valid": validator.is_valid(v), "data": v} for v in values]}
            with open(os.path.join(folder, f"{i:04}.json"), "w", encoding="utf-8") as f:
                json.dump(case, f)
        return subprocess.run([os.path.join(HERE, "baton-bench"), "grammar", "--schemas", folder, "--tokenizer",
                               os.path.join(vocab, "tokenizer.json")], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Structured output against a validator of its own (python3-jsonschema): random schemas; documents that are forced through
the grammar must be accepted exactly if the validator accepts them; texts that are drawn at random from the masks must be
valid. BATON_TEST_GRAMMARS=N tries N schemas, BATON_TEST_SEED another seed."""
import json
import os
import random
import re
import subprocess
import sys

import jsonschema
import pytest

from conftest import BUILD, ROOT
from schema_cases import Documents, Schemas, for_python

sys.path.insert(0, os.path.join(ROOT, "tests", "bench"))
import grammar  # noqa: E402

SCHEMAS = int(os.environ.get("BATON_TEST_GRAMMARS", "150"))
SEED = int(os.environ.get("BATON_TEST_SEED", "1"))
TOKENIZER = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m", "tokenizer.json")
SPELLINGS = list(grammar.SPELLINGS.values())


@pytest.fixture(scope="module")
def helper():
    os.environ["BUILD"] = BUILD
    h = grammar.Helper(TOKENIZER)
    yield h
    assert h.close() == 0


class BeyondDouble(Exception):
    pass


def number(text):
    v = float(text)
    if abs(v) == float("inf") or (v == 0 and re.search("[1-9]", text.lower().split("e")[0])):
        raise BeyondDouble
    return v


def problem(validator, text):
    """Why a generated text is wrong; None: it is right, or Python cannot say."""
    try:
        value = json.loads(text, parse_float=number)
    except BeyondDouble:
        return None
    try:
        errors = list(validator.iter_errors(value))
    except (OverflowError, ValueError):
        return None
    errors = [e for e in errors if e.validator != "multipleOf" or abs(e.instance) < 2 ** 53]
    return errors[0].message if errors else None


def check(helper, rng, schema, validator):
    """Returns how many (valid documents, invalid documents, generated texts) were looked at; None: refused."""
    make = Documents(rng, schema.get("$defs", {}))
    values = [make.make(schema) for _ in range(14)]
    docs = [json.dumps(v, **rng.choice(SPELLINGS)) for v in values]
    answer = helper.ask(grammar.JSON_SCHEMA, json.dumps(schema), docs, walks=3, walk_tokens=rng.randrange(60),
                        seed=rng.randrange(1 << 40))
    if answer["status"] != "OK":
        assert answer["status"] in ("ERR_UNSUPPORTED", "ERR_INVALID"), answer
        if answer["status"] == "ERR_INVALID":  # nothing can be valid
            assert not any(validator.is_valid(v) for v in values), (schema, answer["error"])
        return None
    counts = [0, 0, 0]
    for value, doc, result in zip(values, docs, answer["docs"]):
        valid = validator.is_valid(value)
        assert result["ok"] == valid, (json.dumps(schema), doc, "valid" if valid else "invalid", result)
        counts[not valid] += 1
    for w in answer["walks"]:
        if w["ended"]:
            why = problem(validator, w["text"])
            assert why is None, (json.dumps(schema), w["text"], why)
            counts[2] += 1
    return counts


def test_random_schemas(helper):
    rng = random.Random(SEED)
    schemas = Schemas(rng)
    done, refused, total = 0, {}, [0, 0, 0]
    for _ in range(SCHEMAS):
        schema = schemas.whole()
        validator = jsonschema.Draft202012Validator(for_python(schema), format_checker=jsonschema.FormatChecker())
        counts = check(helper, rng, schema, validator)
        done += counts is not None
        total = [a + b for a, b in zip(total, counts or [0, 0, 0])]
        if counts is None:
            refused[json.dumps(schema)] = True
    print(f"{done} of {SCHEMAS} schemas; valid, invalid documents, generated texts: {total}")
    assert done >= 0.9 * SCHEMAS, list(refused)[:5]
    assert min(total) >= SCHEMAS, total  # the random cases say something


def test_bench_counts(tmp_path):
    """baton-bench grammar counts what is right and what is wrong."""
    cases = {"right": ({"type": "integer"}, [(True, 5), (False, "a")]),
             "takes": ({"type": "integer"}, [(False, 5)]),
             "takes_not": ({"type": "integer"}, [(True, "a"), (True, 1)]),
             "refused": ({"type": "int"}, [(True, 1)])}
    for name, (schema, tests) in cases.items():
        case = {"schema": schema, "tests": [{"valid": v, "data": d} for v, d in tests]}
        (tmp_path / f"{name}.json").write_text(json.dumps(case))
    bench = os.path.join(ROOT, "tests", "bench", "baton-bench")
    p = subprocess.run([bench, "grammar", "--tokenizer", TOKENIZER, "--schemas", str(tmp_path), "--verbose", "--spelling", "all"],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "BUILD": BUILD})
    assert p.returncode == 0, p.stderr
    lines = p.stdout.splitlines()
    values = {line.split(",")[1]: float(line.split(",")[2]) for line in lines if line.startswith("bench,")}
    assert [values["grammar_" + k] for k in ("schemas", "passed", "invalid_accepted", "valid_refused")] == [4, 1, 1, 1], lines
    assert 0 < values["grammar_mask_p50"] <= values["grammar_mask_p99"] <= values["grammar_mask_max"], lines
    assert 0 < values["grammar_compile_p50"] <= values["grammar_compile_p99"], lines
    assert any(line.startswith("takes_not.json: valid data refused (test 0)") for line in lines), lines
    p = subprocess.run([bench, "grammar", "--tokenizer", TOKENIZER, "--schemas", str(tmp_path / "none")],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "BUILD": BUILD})
    assert p.returncode == 1 and "there is no .json file" in p.stderr, p.stderr
    p = subprocess.run([bench, "grammar", "--tokenizer", str(tmp_path / "none.json"), "--schemas", str(tmp_path)],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "BUILD": BUILD})
    assert p.returncode == 1 and "none.json: no such file" in p.stderr, p.stderr

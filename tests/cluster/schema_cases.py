"""Random JSON schemas and documents for test_grammar_schemas.py, from a seed. Every keyword here is one that the
grammar must enforce."""
import copy
import json

WORDS = ["a", "name", "id", "x-1", "", "quote\"d", "back\\slash", "ü", "line\nbreak", "data", "foo", "bar", "b2"]
PATTERNS = ["^[a-z]+$", "^a", "b$", "[0-9]{2}", "^(foo|bar)$", "^[^b]*$", "a.c", "^x-[0-9]*$", "^(?!foo).*$", "o{1,2}"]
FORMATS = {"date": ["2024-02-29", "2023-02-29", "1999-12-31", "24-1-1"], "ipv4": ["1.2.3.4", "256.1.1.1", "0.0.0.0"],
           "uuid": ["123e4567-e89b-12d3-a456-426614174000", "123e4567"]}


def for_python(schema):
    """The schema with patterns that mean to Python's re what they mean to ECMA-262: $ and . are others there."""
    if isinstance(schema, list):
        return [for_python(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            out[key] = python_pattern(value)
        elif key == "patternProperties":
            out[key] = {python_pattern(k): for_python(v) for k, v in value.items()}
        else:
            out[key] = value if key in ("enum", "const") else for_python(value)
    return out


def python_pattern(p):
    return p.replace("$", r"\Z").replace(".", "[^\n\r\u2028\u2029]")


class Schemas:
    def __init__(self, rng):
        self.rng = rng

    def some(self, n):
        return self.rng.randrange(n)

    def any_of(self, values):
        return self.rng.choice(values)

    def integer(self):
        s = {"type": "integer"}
        if self.some(2):
            s["minimum" if self.some(3) else "exclusiveMinimum"] = self.rng.randint(-120, 30)
        if self.some(2):
            s["maximum" if self.some(3) else "exclusiveMaximum"] = self.rng.randint(31, 2000)
        if self.some(4) == 0:
            s["multipleOf"] = self.any_of([2, 3, 5, 7, 10])
        return s

    def number(self):
        s = {"type": "number"}
        if self.some(2):
            s[self.any_of(["minimum", "exclusiveMinimum"])] = self.any_of([-1.5, 0, 0.25, 2, -30])
        if self.some(2):
            s[self.any_of(["maximum", "exclusiveMaximum"])] = self.any_of([3.75, 100, 1e3, 8.5])
        return s

    def string(self):
        s = {"type": "string"}
        kind = self.some(6)
        if kind == 0:
            s["pattern"] = self.any_of(PATTERNS)
        if kind in (1, 2) or (kind == 0 and self.some(2)):
            s["minLength"] = self.some(4)
        if kind in (2, 3):
            s["maxLength"] = 3 + self.some(6)
        if kind == 4:
            s["format"] = self.any_of(list(FORMATS))
        return s

    def literal(self):
        values = self.rng.sample([0, 1, -2.5, "a", "", "foo", True, False, None, "ü\"", 10, [7, "a"], {"a": 7}], 1 + self.some(4))
        return {"const": values[0]} if len(values) == 1 and self.some(2) else {"enum": values}

    def array(self, depth):
        s = {"type": "array"}
        if self.some(4) == 0:
            s["prefixItems"] = [self.schema(depth - 1) for _ in range(1 + self.some(2))]
        if self.some(5):
            s["items"] = self.any_of([False, self.schema(depth - 1)]) if self.some(5) == 0 else self.schema(depth - 1)
        if self.some(3) == 0:
            s["minItems"] = self.some(3)
        if self.some(3) == 0:
            s["maxItems"] = 2 + self.some(3)
        if self.some(4) == 0:
            s["uniqueItems"] = True
        if self.some(8) == 0:
            s["contains"] = self.any_of([self.literal(), self.integer()])
        return s

    def object(self, depth):
        names = self.rng.sample(WORDS, self.some(5))
        s = {"type": "object", "properties": {n: self.schema(depth - 1) for n in names}}
        if self.some(2) and names:
            s["required"] = self.rng.sample(names, 1 + self.some(len(names)))
        kind = self.some(4)
        if kind < 2:
            s["additionalProperties"] = False
        elif kind == 2:
            s["additionalProperties"] = self.schema(depth - 1)
        if self.some(5) == 0:
            s["patternProperties"] = {self.any_of(["^x-", "^[a-z]$"]): self.schema(depth - 1)}
        if self.some(6) == 0:
            s["minProperties"] = self.some(3)
        if self.some(6) == 0:
            s["maxProperties"] = 1 + self.some(4)
        if self.some(8) == 0:
            s["propertyNames"] = self.any_of([{"maxLength": 4}, {"pattern": "^[a-z]*$"}, {"enum": names + ["q", "zz"]}])
        if self.some(8) == 0 and len(names) > 1:
            s["dependentRequired"] = {names[0]: [names[1]]}
        return s

    def schema(self, depth):
        kind = self.some(16 if depth > 0 else 7)
        if kind == 0:
            return self.any_of([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {}, True])
        if kind == 1:
            return self.integer()
        if kind == 2:
            return self.number()
        if kind in (3, 4):
            return self.string()
        if kind in (5, 6):
            return self.literal()
        if kind == 7:
            return self.array(depth)
        if kind == 8:
            return {"anyOf": [self.schema(depth - 1) for _ in range(2)]}
        if kind == 9:  # told apart by a property
            return {"oneOf": [{"type": "object", "properties": {"kind": {"const": k}, "v": self.schema(depth - 1)},
                               "required": ["kind"]} for k in ("a", "b")]}
        if kind == 10:
            a, b = self.object(depth - 1), {"type": "object", "properties": {"more": self.integer()}, "required": ["more"]}
            a.pop("additionalProperties", None)
            a.pop("maxProperties", None)
            return {"allOf": [a, b]}
        if kind == 11:
            return {"$ref": "#/$defs/node"}
        if kind == 12:  # each keyword says something about its own type only
            s = {k: v for part in (self.integer(), self.string(), self.array(0)) for k, v in part.items()}
            s["type"] = self.any_of(["string", "integer", ["string", "array"], ["integer", "string", "null"]])
            if self.some(2):
                del s["type"]
            return s
        if kind == 13:
            return self.any_of([{"not": self.literal()}, {"type": "string", "not": {"pattern": self.any_of(PATTERNS)}},
                                {"not": {"type": ["object", "array"]}}, {"type": "integer", "not": {"minimum": 3}},
                                {"if": {"type": "string"}, "then": self.string(), "else": self.integer()}])
        return self.object(depth)

    def whole(self):
        s = self.schema(3)
        s = copy.deepcopy(s) if isinstance(s, dict) else {}
        if "#/$defs/node" in json.dumps(s):
            s["$defs"] = {"node": {"type": "object", "properties": {"v": self.integer(), "next": {"$ref": "#/$defs/node"}},
                                   "required": ["v"], "additionalProperties": False}}
        return s


class Documents:
    """Documents that are often valid under a schema, because they follow it."""

    def __init__(self, rng, defs):
        self.rng, self.defs = rng, defs

    def anything(self, depth=2):
        kind = self.rng.randrange(9 if depth > 0 else 7)
        if kind == 7:
            return [self.anything(depth - 1) for _ in range(self.rng.randrange(3))]
        if kind == 8:
            return {self.rng.choice(WORDS): self.anything(depth - 1) for _ in range(self.rng.randrange(3))}
        return self.rng.choice([0, 1, -7, 12, 1.5, 3.0, -0.25, 1e3, 99, "a", "abc", "foo", "x-12", "ü", "", True, False, None])

    def number(self, s, whole):
        low = s.get("minimum", s.get("exclusiveMinimum", -50))
        high = s.get("maximum", s.get("exclusiveMaximum", low + 100))
        v = self.rng.choice([low, high, self.rng.uniform(low, max(low, high)), low - 1, high + 1])
        step = s.get("multipleOf", 1)
        v = int(v // step * step) if whole else round(v, self.rng.randrange(4))
        return float(v) if whole and self.rng.randrange(8) == 0 else v

    def string(self, s):
        if "format" in s:
            return self.rng.choice(FORMATS[s["format"]])
        if "pattern" in s and self.rng.randrange(4):
            return self.rng.choice(["abc", "foo", "bar", "b", "a", "12", "x-3", "xyz", "foob", "o", "a\tc", "é", "x12"])
        n = self.rng.choice([s.get("minLength", 0), s.get("maxLength", 5), 3, self.rng.randrange(9)])
        return "".join(self.rng.choice("abcxyz019-\"\\\n/\u00e9\U0001f600\u0001") for _ in range(n))

    def make(self, s, depth=6):
        if not isinstance(s, dict) or depth == 0 or self.rng.randrange(25) == 0:
            return self.anything()
        if "$ref" in s:
            return self.make(self.defs["node"], depth - 1)
        for key in ("anyOf", "oneOf"):
            if key in s:
                return self.make(self.rng.choice(s[key]), depth - 1)
        if "allOf" in s:
            parts = [self.make(p, depth - 1) for p in s["allOf"]]
            return {k: v for p in parts if isinstance(p, dict) for k, v in p.items()}
        if "const" in s or "enum" in s:
            return self.rng.choice([s["const"]] if "const" in s else s["enum"])
        kind = s.get("type")
        kind = self.rng.choice(kind) if isinstance(kind, list) else kind
        if kind in ("integer", "number"):
            return self.number(s, kind == "integer")
        if kind == "string":
            return self.string(s)
        if kind == "array":
            n = self.rng.choice([s.get("minItems", 0), s.get("maxItems", 3), self.rng.randrange(4)])
            prefix = s.get("prefixItems", [])
            items = [self.make(prefix[i] if i < len(prefix) else s.get("items", True), depth - 1) for i in range(n)]
            if s.get("uniqueItems") and len(items) > 1 and self.rng.randrange(4) == 0:
                items[-1] = self.other_spelling(items[0])
            return items
        if kind == "object":
            return self.object(s, depth)
        if kind is None and self.rng.randrange(2):
            return self.rng.choice([self.number(s, True), self.string(s)])
        return {"boolean": True, "null": None}.get(kind, self.anything())

    def other_spelling(self, value):
        """The same value, or nearly the same one, with its members in another order."""
        if isinstance(value, dict):
            keys = list(value)
            self.rng.shuffle(keys)
            return {k: self.other_spelling(value[k]) for k in keys}
        if isinstance(value, list):
            return [self.other_spelling(v) for v in value]
        if isinstance(value, int) and not isinstance(value, bool):
            return self.rng.choice([value, float(value), value + 1])
        return value

    def object(self, s, depth):
        names = [n for n in s.get("properties", {}) if n in s.get("required", []) or self.rng.randrange(2)]
        self.rng.shuffle(names)
        out = {n: self.make(s["properties"][n], depth - 1) for n in names}
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            extra = self.rng.choice(["x-", "q", "other", "zz", "x-9"])
            inner = next((v for k, v in s.get("patternProperties", {}).items() if (extra + " ")[:2] == "x-" or len(extra) == 1), None)
            inner = inner if inner is not None else s.get("additionalProperties", True)
            out.setdefault(extra, self.make(inner, depth - 1))
        if out and self.rng.randrange(12) == 0:
            out.pop(self.rng.choice(list(out)))
        return out

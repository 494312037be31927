"""Which JSON schemas are refused, and that xgrammar keeps to the others."""

import json

import pytest

from eyas.core.errors import RequestError
from eyas.engine import json_schema, regex

xgrammar = pytest.importorskip("xgrammar")
pytest.importorskip("xgrammar.testing")

OBJECT = {"type": "object"}
INT, TEXT = {"type": "integer"}, {"type": "string"}


def tagged(value, **more):
    return {**OBJECT, "properties": {"k": {"const": value}, **more}, "required": ["k"]}


REFUSED = [
    ({"not": INT}, "$.not"),
    ({**TEXT, "not": {"const": "a"}}, "$.not"),
    ({"type": "array", "items": INT, "uniqueItems": True}, "$.uniqueItems"),
    ({"type": "array", "contains": INT}, "$.contains"),
    ({"type": "array", "items": [INT], "additionalItems": False}, "$.additionalItems"),
    ({"type": "array", "items": [INT]}, "$.items"),
    ({**OBJECT, "properties": {"a": INT}, "if": {"required": ["a"]}, "then": {}}, "$.if"),
    (
        {**OBJECT, "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
        "$.dependentRequired",
    ),
    ({**TEXT, "pattern": "^a+$", "minLength": 3}, "$.minLength"),
    ({**TEXT, "format": "date", "maxLength": 3}, "$.maxLength"),
    ({**TEXT, "format": "date", "pattern": "^2"}, "$.format"),
    ({**TEXT, "format": "regex"}, "$.format"),
    ({**TEXT, "pattern": "^(?=a)b$"}, "$.pattern"),
    ({"type": "number", "multipleOf": 0.5}, "$.multipleOf"),
    ({"type": ["integer", "number"], "multipleOf": 2}, "$.multipleOf"),
    ({"type": "integer", "multipleOf": 2.5}, "$.multipleOf"),
    ({"type": "integer", "multipleOf": 0}, "$.multipleOf"),
    ({"minimum": 5}, "$.minimum"),
    ({"required": ["a"]}, "$.required"),
    ({**OBJECT, "properties": {"a": INT}, "required": ["b"]}, "$.required"),
    ({**OBJECT, "additionalProperties": INT, "minProperties": 2}, "$.minProperties"),
    ({**OBJECT, "properties": {f"p{i}": INT for i in range(65)}, "maxProperties": 3}, "$.maxProperties"),
    ({**OBJECT, "properties": {"a": INT}, "propertyNames": {"pattern": "^b+$"}}, "$.propertyNames"),
    ({**OBJECT, "propertyNames": {"pattern": "^b+$"}, "additionalProperties": False}, "$.propertyNames"),
    ({**OBJECT, "propertyNames": {"$ref": "#/x"}, "x": {"pattern": "^b$"}}, "$.propertyNames.$ref"),
    ({**OBJECT, "propertyNames": {"pattern": "(?!b)"}}, "$.propertyNames.pattern"),
    (
        {**OBJECT, "properties": {"ab": TEXT}, "patternProperties": {"^a": INT}},
        "$.patternProperties.^a also matches the property 'ab'",
    ),
    ({**OBJECT, "patternProperties": {"^a$": INT, "^[ab]$": TEXT}}, "$.patternProperties"),
    ({**TEXT, "enum": ["a", 1]}, "$.type does not fit 1"),
    ({**TEXT, "const": 1}, "$.type"),
    ({**TEXT, "enum": ["aa"], "maxLength": 1}, "$.maxLength"),
    ({"enum": [1], "anyOf": [{"const": 2}]}, "$.anyOf"),
    ({**OBJECT, "properties": {"a": INT}, "anyOf": [{"required": ["a"]}]}, "$.type"),
    ({"oneOf": [INT, {"type": "number"}]}, "$.oneOf[1]"),
    ({"oneOf": [tagged("a"), tagged("b"), tagged("a")]}, "$.oneOf[2]"),
    ({"oneOf": [{**OBJECT, "properties": {"k": {"const": one}}} for one in "ab"]}, "$.oneOf[1]"),
    ({"oneOf": [{"enum": [1, "a"]}, {"enum": [1.0]}]}, "$.oneOf[1]"),
    ({"allOf": [INT, {"minimum": 5}]}, "$.allOf"),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": INT}}, "$.minimum"),
    ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", **INT}}}, "$.$ref"),
    ({"$ref": "http://a.b/c"}, "$.$ref"),
    ({"$ref": "#/$defs/x"}, "$.$ref '#/$defs/x' names nothing"),
    ({"$dynamicRef": "#x"}, "$.$dynamicRef"),
    ({**OBJECT, "properties": {"a": {"$id": "http://a/", **INT}}}, "$.properties.a.$id"),
    ({"type": []}, "$.type"),
    ({"type": "text"}, "$.type"),
    ({"type": "integer", "minimum": "5"}, "$.minimum"),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, "$.exclusiveMinimum"),
    ({**TEXT, "minLength": -1}, "$.minLength"),
    ({**TEXT, "maxLength": 1.5}, "$.maxLength"),
    ({"anyOf": []}, "$.anyOf"),
    ({"anyOf": [INT, 3]}, "$.anyOf[1] must be a schema"),
    ([], "$ must be a schema"),
    ({**OBJECT, "properties": {"a": {"type": "array", "items": {"not": {}}}}}, "$.properties.a.items.not"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [INT, {"not": INT}]}}}, "$.anyOf[1].not"),
]


@pytest.mark.parametrize(("schema", "where"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_would_be_left_out_is_refused_by_its_path(schema, where):
    with pytest.raises(RequestError) as caught:
        json_schema.check(json.dumps(schema), "response_format")
    assert str(caught.value).startswith(f"response_format: {where}")


@pytest.mark.parametrize("text", ["{", "NaN", '{"type": "integer", "minimum": 1e999}', "[" * 100_000])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(RequestError, match="response_format: the schema is not JSON"):
        json_schema.check(text, "response_format")


def test_depth_is_limited():
    schema = INT
    for _ in range(json_schema.MAX_DEPTH):
        schema = {"type": "array", "items": schema}
    json_schema.check(json.dumps(schema), "x")
    with pytest.raises(RequestError, match="schemas deep"):
        json_schema.check(json.dumps({"type": "array", "items": schema}), "x")


def test_alternatives_that_double_at_every_level_are_compared_once():
    schema = {"$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)}}
    schema["$defs"]["a25"] = INT
    schema["oneOf"] = [{"$ref": "#/$defs/a0"}, TEXT]
    json_schema.check(json.dumps(schema), "x")


KEPT = [
    # schema, answers that match, answers that do not
    (
        {**TEXT, "minLength": 2, "maxLength": 3},
        ['"ab"', '"\u00e9\U0001f600"'],
        ['"a"', '"abcd"', '"\U0001f600"'],
    ),
    ({**TEXT, "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
    ({**TEXT, "pattern": "^a|b$"}, ['"a"', '"b"'], ['"c"']),
    ({**TEXT, "pattern": "^[^a]$"}, ['"b"'], ['"a"', '"""', '"\\"']),
    ({**TEXT, "format": "date"}, ['"2020-01-31"'], ['"x"', '"2020-1-1"']),
    ({**TEXT, "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
    ({**INT, "minimum": 5, "exclusiveMaximum": 9}, ["5", "8"], ["4", "9", "-6", "5.5"]),
    ({**INT, "multipleOf": 7, "minimum": -7, "maximum": 99}, ["-7", "0", "98"], ["-14", "15", "105"]),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 2}, ["1.5", "2"], ["1", "1.0", "2.1", "1e3"]),
    ({"type": ["integer", "string"], "minimum": 5, "minLength": 2}, ["6", '"ab"'], ["4", '"a"', "null"]),
    ({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
    (
        {"type": "array", "prefixItems": [INT, TEXT], "items": False},
        ['[1, "a"]'],
        ['["a", 1]', '[1, "a", 1]'],
    ),
    ({**OBJECT, "properties": {"a": INT}, "required": ["a"]}, ['{"a": 1}'], ["{}", '{"a": "x"}']),
    (
        {**OBJECT, "properties": {"a": TEXT}, "additionalProperties": INT},
        ['{"b": 1}'],
        ['{"a": 1}', '{"b": "x"}'],
    ),
    ({**OBJECT, "properties": {"b": TEXT}, "patternProperties": {"^a$": INT}}, ['{"a": 1}'], ['{"a": "x"}']),
    ({**OBJECT, "properties": {"a": INT, "b": INT}, "minProperties": 1}, ['{"b": 1}'], ["{}"]),
    ({**OBJECT, "properties": {"a": INT, "b": INT}, "maxProperties": 1}, ["{}"], ['{"a": 1, "b": 1}']),
    ({**OBJECT, "propertyNames": {"maxLength": 1}}, ['{"a": 1}'], ['{"ab": 1}']),
    ({"properties": {"a": INT}}, ['{"a": 1}'], ['{"a": "x"}']),
    ({"items": INT}, ["[1]"], ['["x"]']),
    ({**TEXT, "enum": ["a", "\u00e9"]}, ['"a"', '"\u00e9"'], ['"b"']),
    ({"const": None}, ["null"], ["1"]),
    ({"anyOf": [INT, {"type": "null"}]}, ["1", "null"], ['"a"']),
    ({"oneOf": [tagged("a", x=INT), tagged("b")]}, ['{"k": "a", "x": 1}', '{"k": "b"}'], ['{"k": "c"}']),
    ({"oneOf": [{"$ref": "#/$defs/x"}, TEXT], "$defs": {"x": INT}}, ["1", '"a"'], ["null"]),
    ({"oneOf": [{"enum": [1, 2]}, {"const": 3}, TEXT]}, ["1", "3", '"a"'], ["4"]),
    ({"allOf": [{"$ref": "#/definitions/x"}], "definitions": {"x": INT}}, ["1"], ['"a"']),
    ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": INT}}, ["1"], ['"a"']),
    (
        {
            **OBJECT,
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["next"],
        },
        ['{"next": {"next": null}}'],
        ['{"next": 1}', '{"next": {}}'],
    ),
    ({**TEXT, "title": "t", "default": "d", "x-unknown": 1, "uniqueItems": False}, ['"a"'], ["1"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT, ids=lambda value: str(value)[:60])
def test_xgrammar_keeps_to_what_is_let_through(schema, good, bad, capfd):
    json_schema.check(json.dumps(schema), "x")
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    accepts = xgrammar.testing._is_grammar_accept_string
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []
    # What it finds no proof of is told apart here.
    warnings = [line for line in capfd.readouterr().err.splitlines() if "oneOf with overlapping" not in line]
    assert warnings == []


@pytest.mark.parametrize(
    "pattern", ["a$b", "a^b", "(^a)", "(?=a)b", "(?!a)b", r"a\Z", r"\Aa", "x(a$)", r"[a](?=b)", r"\\(?=b)"]
)
def test_patterns_that_would_be_misread(pattern):
    assert regex.fault(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["^a$", "a", "", "^a$|^b$", r"\^a\$", "[$^(?=]+", r"[\]^$]", "(a|b)+?", r"\(?=", "(?:a)"],
)
def test_patterns_that_are_read_as_meant(pattern):
    assert regex.fault(pattern) is None

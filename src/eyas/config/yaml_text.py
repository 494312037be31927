"""YAML as recipes use it: the safe subset of PyYAML, minus two traps of YAML 1.1, plus one check.

* `on`, `off`, `yes`, `no` are words, not booleans; only `true` and `false` are.
* `1e-3` is a number (YAML 1.1 wants `1.0e-3` and silently reads a string).
* A key written twice in one mapping is an error, not "the last one wins".
"""

import re
from typing import Any

import yaml

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader with the resolvers of YAML 1.2 for booleans and floats, and unique keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in this mapping", key_node.start_mark
                )
            seen.add(key)
        result: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return result


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d+(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF))$"
        r"|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """Return the document's plain values; raises yaml.YAMLError with line and column."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 -- a subclass of SafeLoader


def write_yaml(value: Any) -> str:
    """Return plain values as block YAML that `parse_yaml` reads back to the same values."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """SafeDumper that quotes what our loader would read as something else (`1e-3` as text)."""


_Dumper.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
_Dumper.add_implicit_resolver(
    _FLOAT, re.compile(r"^[-+]?\d[\d_]*(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)

"""A task and the Python asserts that it must pass, as a function to complete; nothing of it is executed."""

import ast
import builtins
import random
import re
from typing import Any

_OPENINGS = (
    "Complete the function below.",
    "Finish this Python function.",
    "Write the rest of this Python code.",
)
# The words that ask for a function, and the sentence that announces the tests.
_TASK = re.compile(r"Write an? (?:python )?function (?:to|that|which) |[^.?!\n]*:\s*\Z", re.IGNORECASE)
_NAMES = {"list": "items", "tuple": "values", "dict": "table", "set": "items"}
_NAMES |= {"str": "text", "bool": "flag", "float": "x", "int": "n"}


def stub(text: str, rng: random.Random) -> str:
    '''A stub with signature, docstring and one to three examples, or the text where it has no such asserts.

        Write a function to add two numbers. Your code should pass these tests:
        assert add(1, 2) == 3

    becomes an opening sentence and

        def add(n: int, n2: int) -> int:
            """Add two numbers.
            >>> add(1, 2)
            3
            """

    The types are those of the literals in all asserts; half of the stubs have no hints.
    '''
    head, _, tests = text.partition("\nassert ")
    task, calls = _TASK.sub("", head).strip(), _calls("assert " + tests)
    if not task or not calls:
        return text
    name, typed, used = calls[0][0], rng.random() < 0.5, dict[str, str]()
    *kinds, back = [
        _kind(column) for column in zip(*([*args, out] for _, args, out, _ in calls), strict=True)
    ]
    for kind in kinds:
        base, number = _NAMES.get(kind, "value"), 1
        while (word := f"{base}{number}" if number > 1 else base) in used:
            number += 1
        used[word] = f"{word}: {kind}" if typed and kind else word
    lines = [task[0].upper() + task[1:]]
    for _, _, out, call in calls[: rng.randint(1, 3)]:
        lines += [f">>> {call}", repr(out)]
    body = "\n    ".join(lines)
    if '"""' in body:
        return text
    returns, raw = f" -> {back}" if typed and back else "", "r" if "\\" in body else ""
    signature = f"def {name}({', '.join(used.values())}){returns}:"
    return f'{rng.choice(_OPENINGS)}\n\n{signature}\n    {raw}"""{body}\n    """\n'


def _calls(tests: str) -> list[tuple[str, list[Any], Any, str]]:
    """(function, arguments, result, call) of the asserts `f(literals) == literal`, other asserts left out.

    None where something else stands, or functions or numbers of arguments differ.
    """
    found: list[tuple[str, list[Any], Any, str]] = []
    try:
        for node in ast.parse(tests).body:
            match node:
                case ast.Assert(ast.Compare(ast.Call(keywords=[]) as call, [ast.Eq()], [out])):
                    name = ast.unparse(call.func)
                    if name.isidentifier() and not hasattr(builtins, name):
                        args = [ast.literal_eval(argument) for argument in call.args]
                        found.append((name, args, ast.literal_eval(out), ast.unparse(call)))
                        repr(found[-1])  # an int of too many digits for it is a ValueError
                case ast.Assert():
                    pass
                case _:
                    return []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return found if len({(name, len(args)) for name, args, _, _ in found}) == 1 else []


def _kind(values: tuple[Any, ...]) -> str:
    """Name of the type that all values have, float for ints among floats; "" for others."""
    kinds = {type(value).__name__ for value in values}
    if kinds == {"int", "float"}:
        return "float"
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_NAMES) else ""

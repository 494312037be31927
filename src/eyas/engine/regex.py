"""What xgrammar would read otherwise than a regular expression means it.

It matches the whole text against an automaton. Look-ahead, anchors that are not at an end and escapes that it
does not know it drops with a line on the process's stderr; here they are refused. What it refuses itself
(back references, word boundaries, flags) is left to it.
"""

KNOWN_ESCAPES = frozenset("dDwWsSnrtfvxuc0bBpPkK123456789")
"""Letters and digits behind a backslash that it takes, or refuses itself."""


def fault(pattern: str) -> str | None:
    """Why a pattern would not be kept to; None if it would.

    An anchor may stand at the ends of the pattern or of an alternative that is not inside a group, where it
    says what holds anyway.

    >>> fault("^a+$"), fault("^a$|^b$")
    (None, None)
    >>> fault("^(?=a)b")
    'look-ahead is not served'
    """
    depth, index, size = 0, 0, len(pattern)
    while index < size:
        char = pattern[index]
        if char == "\\":
            letter = pattern[index + 1 : index + 2]
            if letter.isalnum() and letter not in KNOWN_ESCAPES:
                return f"\\{letter} is not served"
            index += 2
            continue
        if char == "[":
            index = _end_of_class(pattern, index)
            continue
        if char == "(":
            if pattern.startswith(("(?=", "(?!"), index):
                return "look-ahead is not served"
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "^" and not (depth == 0 and (index == 0 or pattern[index - 1] == "|")):
            return "'^' is served at the beginning only"
        elif char == "$" and not (depth == 0 and (index == size - 1 or pattern[index + 1] == "|")):
            return "'$' is served at the end only"
        index += 1
    return None


def _end_of_class(pattern: str, begin: int) -> int:
    """Index behind the "]" that ends the class which begins at `begin`."""
    index = begin + 1
    if pattern[index : index + 1] == "^":
        index += 1
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1

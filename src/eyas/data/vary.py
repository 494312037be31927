"""New prompts from old ones, so that the target answers what it has not answered yet.

A variation follows from the seed and the prompt's id, whatever other prompts there are; only what is dropped
as a duplicate depends on them. It may have no right answer (5 of 3 apples eaten, options without the sum): a
head learns the target's words, and those need not be right.
"""

import calendar
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from eyas.data.alike import Known, words_of
from eyas.data.sources import Prompt
from eyas.data.vary_stubs import stub

# What keeps its numbers and names: fences, `spans`, [lists], calls(1), TeX with commands, lines of code.
_CODE = re.compile(
    r"```[\s\S]*?(?:```|\Z)|`[^`\n]+`|\[[^\]\n]*\]|\w\([^)\n]*\)|\$[^$\\\n]*\\[^$\n]*\$"
    r"|^(?: {4}|\t|>>>|assert |def |class |import |from \S+ import ).*$|^.*[{};]$",
    re.MULTILINE,
)
_NUMBER = re.compile(
    r"(?<![^\s($€£])(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:\.\d{1,9})?(?=%|-[a-z]|[.,;:?!)]*(?:\s|\Z))",
    re.ASCII,
)
_MONTH = rf"\b(?:{'|'.join([*calendar.month_name[1:], *calendar.month_abbr[1:]])})\b"
# Numbers that stay: years and 007; behind and before these, parts of a fraction and of a date; list numbers.
_FIXED = re.compile(r"(?:19|20)\d\d|0\d.*")
_BEFORE, _AFTER = re.compile(rf"(?:/\s*|{_MONTH} )\Z"), re.compile(rf"\s*/\s*\d| (?:of )?{_MONTH}")
_LISTED = re.compile(r"(?:\A|\n)\s*\Z")
_CAPITAL = re.compile(r"\b[A-Z][a-z]+\b")
# Capitals after and, inside a sentence or as a title, before a name.
_SURNAME = re.compile(" [A-Z]")
_TITLE = re.compile(r"""(?:[^\s.?!:"] [A-Z][a-z]*|King|Queen|Saint|St\.|Sir|Pope|Lake) \Z""")
_HERS = """
    Alice Alyssa Amy Angela Anna Betty Brenda Carla Carol Chloe Cindy Emily Emma Hannah Helen Jane Janet
    Jenny Jessica Jill Joan Julia Karen Katie Lily Linda Lisa Lucy Maria Martha Mary Megan Mei Melanie
    Nancy Nina Olivia Priya Rachel Rebecca Sally Sara Sarah Sofia Susan Tina Wendy Zoe
"""
_HIS = """
    Adam Alex Andy Ben Bob Bobby Carl Carlos Dan Danny Dave David Diego Edward Frank Fred George Greg
    Harry Henry Jack Jacob Jake James Jason Jeff Jerry Jim Joe John Jose Josh Keith Kevin Kofi Luke Matt
    Michael Mike Oliver Omar Paul Peter Randy Ryan Sam Steve Steven Tim Tom Tony
"""
_POOL = {name: pool for pool in (_HERS.split(), _HIS.split()) for name in pool}
# Share of eight-word runs from which a prompt counts as an excluded one.
KNOWN = 0.2
_TURN = "\n\x1e\n"
_NUMBERED = re.compile(r"(?:~v\d+)+\Z", re.ASCII)


def varied_from(prompt_id: str) -> str:
    """The id of the prompt that this one is a variation of: "a~v2" and "a~v2~v1" -> "a"; "a~2" stays."""
    return _NUMBERED.sub("", prompt_id)


def numbers(text: str, rng: random.Random) -> str:
    """Other plain numbers of like size and roundness; equal ones stay equal.

    "Tom has 1,000 nuts, $12.50 and 7 cats." -> "Tom has 1,400 nuts, $9.80 and 3 cats."
    0, 1, years (1900 to 2099), dates, fractions, list numbers, digits in words and in code stay.
    """
    known: dict[tuple[str, bool], str] = {}

    def other(match: re.Match[str]) -> str:
        own, start, end = match.group(), match.start(), match.end()
        before, after = match.string[max(0, start - 16) : start], match.string[end : end + 16]
        fixed = _FIXED.fullmatch(own) and not before.endswith(("$", "€", "£"))
        listed = re.match(r"[.)]+\s", after) and _LISTED.search(before)
        if fixed or listed or _BEFORE.search(before) or _AFTER.match(after):
            return own
        key = own, after.startswith("%")
        if key not in known:  # different ones stay different where they can
            tries = [_other(*key, rng) for _ in range(4)]
            known[key] = next((new for new in tries if new not in known.values()), tries[0])
        return known[key]

    return _prose(text, lambda part: _NUMBER.sub(other, part))


def _other(own: str, percent: bool, rng: random.Random) -> str:
    """Another number: "1,000" -> "600" to "1,800" in hundreds, "0.5" -> "0.2" to "0.9"; "100" % stays."""
    digits = own.replace(",", "")
    places = len(digits.partition(".")[2])
    value, one = int(digits.replace(".", "")), 10**places
    if value <= 1:
        return own
    size, step = len(str(value)), 1
    if value >= 100:
        step = 10 ** min(size - len(str(value).rstrip("0")), size - 2)
    if step == 1 and value > 10 and value % 5 == 0:
        step = 10 if 50 <= value < 100 and value % 10 == 0 else 5
    low, high = (2, 9) if value < 10 else (-(-6 * value // (10 * step)), 18 * value // (10 * step))
    if percent and value <= 100 * one:
        high = min(high, (100 * one - 1) // step)
    if low >= high or (percent and value == 100 * one):
        return own
    new = rng.randrange(low, high)
    whole, part = divmod((new + (new * step >= value)) * step, one)  # all but the old one
    return (f"{whole:,}" if "," in own else str(whole)) + (f".{part:0{places}}" if places else "")


def names(text: str, rng: random.Random) -> str:
    """Other given names, each the same everywhere: "Ann met Tom. Ann's cat" -> "Zoe met Omar. Zoe's cat".

    Common English names, hers for hers and his for his, yet a pronoun may not fit. Names beside a capital
    (King James, James Cook) are of people whom an answer may know, and stay.
    """
    found: dict[str, bool] = {}

    def look(part: str) -> str:
        for match in _CAPITAL.finditer(part):
            name, start, end = match.group(), match.start(), match.end()
            if name in _POOL:
                titled = _TITLE.search(part[max(0, start - 24) : start])
                found[name] = found.get(name, True) and not titled and not _SURNAME.match(part, end)
        return part

    _prose(text, look)
    new: dict[str, str] = {}
    for name in (name for name, free in found.items() if free):
        new[name] = rng.choice([n for n in _POOL[name] if n not in text and n not in new.values()] or [name])
    return _prose(text, lambda part: _CAPITAL.sub(lambda m: new.get(m.group(), m.group()), part))


def _prose(text: str, change: Callable[[str], str]) -> str:
    """Change what is not code; `change` sees a NUL in each code's place."""
    codes = [match.group() for match in _CODE.finditer(text)]
    parts = change(_CODE.sub("\0", text)).split("\0")
    if len(parts) != len(codes) + 1:  # the text has a NUL itself
        return text
    return "".join(part + code for part, code in zip(parts, [*codes, ""], strict=True))


WAYS = {"numbers": numbers, "names": names, "stubs": stub}


def variations(
    prompt: Prompt, how: Sequence[str], copies: int, seed: int
) -> dict[tuple[str, ...], list[str]]:
    """At most `copies` different variations: their turns, and the ways of `how` that changed them.

    A stub is changed no further: its examples hold only as they are. More copies begin with the same ones.
    """
    rng = random.Random(f"{seed}:{prompt.id}")  # noqa: S311
    own = _TURN.join(prompt.turns)  # together, so that a name is the same in all
    found: dict[tuple[str, ...], list[str]] = {}
    for _ in range(4 * copies):
        text, ways = own, list[str]()
        for name in sorted(how, key="stubs".__ne__):
            new = text if "stubs" in ways else WAYS[name](text, rng)
            if new != text:
                text, ways = new, [*ways, name]
        if not ways or len(found) == copies:
            break
        found.setdefault(tuple(text.split(_TURN)), ways)
    return found


def vary(
    prompts: list[Prompt],
    how: Sequence[str] = ("numbers", "names"),
    copies: int = 1,
    seed: int = 0,
    excluded: Sequence[Prompt] = (),
    progress: Callable[[int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Records that `regenerate` reads (a~v2 is variation 2 of a), and how many were made and left out.

    Left out are prompts as "unchanged" and "excluded", variations as "duplicate" and "excluded". Prompts near
    `excluded` ones are not varied at all: other numbers may hide what they are.
    """
    barred = Known(turn for prompt in excluded for turn in prompt.turns)
    seen = {(prompt.system, prompt.turns) for prompt in prompts}
    records: list[dict[str, Any]] = []
    changed, left_out = Counter(dict.fromkeys(how, 0)), Counter(unchanged=0, duplicate=0, excluded=0)

    def near(turns: tuple[str, ...]) -> bool:
        return any(barred.share(words_of(turn)) >= KNOWN for turn in turns)

    for done, prompt in enumerate(prompts, start=1):
        left = near(prompt.turns)
        made = {} if left else variations(prompt, how, copies, seed)
        left_out["excluded" if left else "unchanged"] += not made
        for number, (turns, ways) in enumerate(made.items(), start=1):
            known = (prompt.system, turns) in seen
            if known or near(turns):
                left_out["duplicate" if known else "excluded"] += 1
                continue
            seen.add((prompt.system, turns))
            changed.update(ways)
            new = replace(prompt, turns=turns)
            users = [{"role": "user", "content": turn} for turn in turns[1:]]
            body: dict[str, Any] = {"turns": turns} if users else {"prompt": turns[0]}
            if new.system is not None:
                body = {"messages": [*new.opening, *users]}
            records.append({"id": f"{prompt.id}~v{number}", "source": prompt.source, **body})
        if progress is not None:
            progress(done)
    counts = {"num_prompts": len(prompts), "num_written": len(records)}
    return records, counts | {"changed": dict(changed), "left_out": dict(left_out)}

"""What the target wrote in a user's place: the text, or why it is none that a user would send."""

from dataclasses import dataclass

from eyas.core.text import is_unicode
from eyas.data.loops import LoopRule, loop_start
from eyas.data.template import ChatTemplate

# Users' texts are short, so a loop shows in fewer tokens than an answer's.
USER_LOOPS = LoopRule(window=32)


@dataclass(frozen=True, slots=True)
class Written:
    """A text, or the `fault` for which it is left out."""

    text: str
    fault: str = ""


class UserTexts:
    """Reads what a generator sampled behind the opening of a user's turn.

    Faults: "failed" (the request did), "cut_off" (its end never came), "special" (a special token inside),
    "broken" (bytes that are no text), "short", "loop".
    """

    def __init__(self, template: ChatTemplate, *, min_tokens: int = 1, rule: LoopRule = USER_LOOPS) -> None:
        self.template, self.min_tokens, self.rule = template, min_tokens, rule
        self.end_id = template.user_end_id()
        self.special = template.special_ids()

    def read(self, ids: list[int], reason: str) -> Written:
        """The text of sampled ids; their last is the end token where the reason is "stop"."""
        if reason not in ("stop", "length"):
            return Written("", "failed")
        if reason == "length" or not ids or ids[-1] not in self.special:
            return Written("", "cut_off")
        body = ids[:-1]
        if self.special.intersection(body):
            return Written("", "special")
        text: str = self.template.tokenizer.decode(body, clean_up_tokenization_spaces=False)
        if "\ufffd" in text or not is_unicode(text):
            return Written(text, "broken")
        if len(body) < self.min_tokens or not text.strip():
            return Written(text, "short")
        if loop_start(body, self.rule) < len(body):
            return Written(text, "loop")
        return Written(text)

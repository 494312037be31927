r"""Chat template to token ids and loss mask, by rendering prefixes; no separator is typed by hand.

With render(m) the tokenizer's own chat template, the text of the assistant's message i is what
render(messages[:i + 1]) has beyond render(messages[:i], with generation prompt). It is tokenised apart
from what stands before it, as at inference, where the prompt is tokenised and the answer's ids follow.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n | Hello <|im_end|> | \n
    context, mask 0                                           supervised          context

Supervised are the answer and its end-of-turn token (the last end-of-text id of its piece); what a template
puts before the answer (an empty thinking block) and after its end is context.

The same way the target can be asked for what a *user* would say: a marked message is rendered, and what
stands before the mark is where the user's text begins. Its end is the first special token behind the mark.

    <|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n | MARK | <|im_end|> \n<|im_start|>assistant\n
    the target goes on from here                                      and ends here
"""

from dataclasses import dataclass
from typing import Any

from eyas.core.errors import DataError
from eyas.data.sources import Message

Span = tuple[int, int]

_MARK = "Userstextbeginshere"
"""Stands for a user's text: letters only, so that no template trims or escapes it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document: token ids and the half-open spans of them that the assistant wrote."""

    ids: list[int]
    spans: list[Span]

    @property
    def mask(self) -> list[int]:
        """1 for the assistant's tokens, 0 elsewhere; ids [5, 6, 7, 8] with spans [(1, 3)] -> [0, 1, 1, 0]."""
        mask = [0] * len(self.ids)
        for begin, end in self.spans:
            mask[begin:end] = [1] * (end - begin)
        return mask


def check_spans(ids: list[int] | tuple[int, ...], spans: list[Span] | tuple[Span, ...], name: str) -> None:
    """Raise DataError unless spans are ascending, inside the document, and neither none nor all of it."""
    last = 0
    for begin, end in spans:
        if not last <= begin < end <= len(ids):
            raise DataError(f"{name}: bad spans {list(spans)} for a document of {len(ids)} tokens")
        last = end
    supervised = sum(end - begin for begin, end in spans)
    if supervised == 0:
        raise DataError(f"{name}: no token is supervised; the conversation has no assistant text")
    if supervised == len(ids):
        raise DataError(f"{name}: every token is supervised; the chat template shows no prompt")


class ChatTemplate:
    """A tokenizer's chat template. `options` are handed to it (enable_thinking and the like)."""

    def __init__(
        self, tokenizer: Any, end_ids: tuple[int, ...], *, options: dict[str, Any] | None = None
    ) -> None:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise DataError("the target has no chat template; give a model with one (tokenizer_config.json)")
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.options = options or {}

    def render(self, messages: list[Message], *, open_answer: bool = False) -> str:
        """Text of messages; with `open_answer` it ends where the assistant's next answer begins."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_answer, **self.options
            )
        except Exception as error:  # templates raise what they like (jinja's TemplateError, ValueError, ...)
            raise DataError(f"the chat template refuses these messages: {error}") from error
        return text

    def tokenize(self, text: str) -> list[int]:
        """Ids of rendered text; the template wrote the special tokens already."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of messages with the answer opened: what the target is asked to continue."""
        return self.tokenize(self.render(messages, open_answer=True))

    def own_ids(self) -> frozenset[int]:
        """Ids that the template itself writes (and a few of the probe's text): never free for other uses."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        text = self.render(probe) + self.render([*probe, probe[0]], open_answer=True)
        return frozenset(self.tokenize(text)) | self.end_ids

    def follow_up_ids(
        self, messages: list[Message], answer: str, following: Message, *, ended: bool
    ) -> list[int]:
        """Ids between an answer's own ids and the next answer: end of turn, next user turn, opening.

        `ended` says that the answer's ids include their end-of-turn token, which is then not repeated.
        """
        grown = [*messages, {"role": "assistant", "content": answer}, following]
        return self._continue(messages, answer, self.render(grown, open_answer=True), ended=ended)

    def user_ids(self, messages: list[Message]) -> list[int]:
        """Ids of messages with a user's turn opened: what the target continues to write a user's text."""
        return self.tokenize(self._user_opening(messages))

    def user_follow_up_ids(self, messages: list[Message], answer: str, *, ended: bool) -> list[int]:
        """Ids between an answer's own ids and the text of the user's next turn; `ended` as above."""
        grown = [*messages, {"role": "assistant", "content": answer}]
        return self._continue(messages, answer, self._user_opening(grown), ended=ended)

    def user_end_id(self) -> int:
        """The special token that ends a user's text; DataError where the template writes none."""
        text = self.render([{"role": "user", "content": _MARK}], open_answer=True)
        special = self.special_ids()
        for token in self.tokenize(text[text.rindex(_MARK) + len(_MARK) :]) if _MARK in text else []:
            if token in special:
                return token
            if self.tokenizer.decode([token]).strip():
                break
        raise DataError(
            "the chat template ends a user's text with no special token, so the target cannot end one itself"
        )

    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text: the tokenizer's special tokens and the end-of-text ids."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marked = {token for token, about in added.items() if about.special}
        return frozenset(marked | set(self.tokenizer.all_special_ids)) | self.end_ids

    def shows_system(self) -> bool:
        """Whether a system message stands in what the target reads."""
        probe = [{"role": "system", "content": _MARK}, {"role": "user", "content": "a"}]
        try:
            return _MARK in self.render(probe)
        except DataError:
            return False

    def _user_opening(self, messages: list[Message]) -> str:
        text = self.render([*messages, {"role": "user", "content": _MARK}])
        if text.count(_MARK) != 1:
            raise DataError(f"the chat template shows a user's text {text.count(_MARK)} times, not once")
        return text[: text.index(_MARK)]

    def _continue(self, messages: list[Message], answer: str, whole: str, *, ended: bool) -> list[int]:
        """Ids of what `whole` has beyond `messages` and `answer`, without an end of turn that was said."""
        _, after, (_, tail) = self._piece(messages, answer)
        if not whole.startswith(after):
            raise DataError("the chat template rewrites earlier turns; regenerate single turns only")
        ids = self.tokenize(tail + whole[len(after) :])
        tail_has_end = self.end_ids.intersection(self.tokenize(tail))
        if ended and tail_has_end:
            first = next(i for i, token in enumerate(ids) if token in self.end_ids)
            ids = ids[first + 1 :]
        return ids

    def encode(
        self, messages: list[Message], *, name: str = "conversation", last_turn_only: bool = False
    ) -> Encoded:
        """Ids and supervised spans of a conversation; raises DataError naming it.

        With `last_turn_only` only the last answer is supervised and history may be rewritten by the template.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if last_turn_only:
            answers = answers[-1:]
        ids: list[int] = []
        spans: list[Span] = []
        written = ""
        for i in answers:
            try:
                before, after, (lead, _) = self._piece(messages[:i], messages[i]["content"])
            except DataError as error:
                raise DataError(f"{name}: {error}") from error
            if not before.startswith(written):
                raise DataError(
                    f"{name}: the chat template rewrites earlier turns; supervise the last turn only"
                )
            ids += self.tokenize(before[len(written) :]) + self.tokenize(lead)
            answer = self.tokenize(after[len(before) + len(lead) :])
            ends = [place for place, token in enumerate(answer) if token in self.end_ids]
            spans.append((len(ids), len(ids) + (ends[-1] + 1 if ends else len(answer))))
            ids += answer
            written = after
        check_spans(ids, spans, name)
        return Encoded(ids, spans)

    def _piece(self, messages: list[Message], answer: str) -> tuple[str, str, tuple[str, str]]:
        """Text before the answer, text with it, and what the template puts right before and after it."""
        before = self.render(messages, open_answer=True)
        after = self.render([*messages, {"role": "assistant", "content": answer}])
        if not after.startswith(before):
            raise DataError(
                "the chat template renders an answer without its generation prompt, so that training would "
                "differ from serving; choose template options under which the two agree"
            )
        region = after[len(before) :]
        # Some templates strip an answer's outer white space.
        content = answer if answer in region else answer.strip()
        start = region.find(content)
        if not content or start < 0:
            raise DataError("an assistant message is empty, or the chat template rewrites it")
        return before, after, (region[:start], region[start + len(content) :])

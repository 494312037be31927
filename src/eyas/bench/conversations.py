"""Prompts as a model reads them: the chat template around the turns, and tokens back as pieces of text."""

from collections.abc import Iterator, Sequence
from typing import Any

from eyas.bench.workload import Prompt
from eyas.core.errors import RequestError
from eyas.core.text import is_unicode


def batches(
    tokenizer: Any, prompts: Sequence[Prompt], batch: int, num_turns: int
) -> Iterator[tuple[tuple[str, ...], list[list[int]], list[str]]]:
    """Yield (ids, prompts as token ids, an empty list); the caller puts the replies into the list.

    Turn 2 of a conversation follows turn 1 and its reply, so the replies must be there before the next batch
    is asked for. Ids are "prompt id/turn", turns counted from 1.
    """
    for chunk in _chunks(prompts, batch):
        talks: dict[str, list[dict[str, str]]] = {prompt.id: prompt.opening() for prompt in chunk}
        for turn in range(num_turns):
            active = [prompt for prompt in chunk if turn < len(prompt.turns)]
            if not active:
                break
            for prompt in active:
                talks[prompt.id].append({"role": "user", "content": prompt.turns[turn]})
            replies: list[str] = []
            names = tuple(f"{prompt.id}/{turn + 1}" for prompt in active)
            yield names, [encode_chat(tokenizer, talks[prompt.id]) for prompt in active], replies
            for prompt, reply in zip(active, replies, strict=True):
                talks[prompt.id].append({"role": "assistant", "content": reply})


def num_batches(prompts: Sequence[Prompt], batch: int, num_turns: int) -> int:
    """Return how many batches `batches` will yield."""
    return sum(
        max(min(len(prompt.turns), num_turns) for prompt in chunk) for chunk in _chunks(prompts, batch)
    )


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation that the assistant is to go on with.

    A tokenizer without a chat template (a base model) gets the last message as plain text.
    RequestError if a message is no text in UTF-8.
    """
    if not all(is_unicode(message["content"]) for message in messages):
        raise RequestError("the prompt is no text in UTF-8: it holds half of a surrogate pair or raw bytes")
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Return the text that each token adds; an unfinished character waits for the token that ends it."""
    pieces, shown = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if end < len(token_ids) and text.endswith("\ufffd"):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        shown = text
    return pieces


def _chunks(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]

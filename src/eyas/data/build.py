"""Conversations on disk -> a token store."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.core.errors import DataError
from eyas.data.files import key_of
from eyas.data.sources import read_conversations
from eyas.data.store import StoreWriter
from eyas.data.template import ChatTemplate
from eyas.data.vary import varied_from


def build_store(
    conversations: Path | Sequence[Path],
    out: Path,
    *,
    vocab_size: int,
    template: ChatTemplate | None,
    meta: dict[str, Any],
    last_turn_only: bool = False,
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Store JSONL files and folders of shards, one after the other; returns the manifest.

    Records with exact token ids keep them; the others go through `template`. Documents are cut at
    `max_tokens`, a cut that leaves nothing supervised drops the document (counted in the manifest's meta).
    """
    counts = {"num_exact": 0, "num_templated": 0, "num_dropped": 0}
    writer = StoreWriter(out, vocab_size=vocab_size, meta={**meta, "conversations": counts})
    paths = [conversations] if isinstance(conversations, Path) else conversations
    everything = ((path, one) for path in paths for one in read_conversations(path))
    for number, (path, conversation) in enumerate(everything, start=1):
        if conversation.token_ids is not None and conversation.spans is not None:
            ids, spans = list(conversation.token_ids), list(conversation.spans)
            counts["num_exact"] += 1
        elif template is not None:
            encoded = template.encode(
                list(conversation.messages), name=conversation.id, last_turn_only=last_turn_only
            )
            ids, spans = encoded.ids, encoded.spans
            counts["num_templated"] += 1
        else:
            raise DataError(
                f"{path}: {conversation.id} has no token_ids; give --target for its chat template"
            )
        if max_tokens is not None and len(ids) > max_tokens:
            ids = ids[:max_tokens]
            spans = [(begin, min(end, max_tokens)) for begin, end in spans if begin < max_tokens]
        if spans:
            # All answers to a prompt and its variations are trained on, or all are held out.
            writer.add(conversation.id, ids, spans, key=key_of(varied_from(conversation.prompt_id)))
        else:
            counts["num_dropped"] += 1
        if progress is not None:
            progress(number)
    return writer.close()

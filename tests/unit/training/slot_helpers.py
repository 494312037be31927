"""Tiny batches and heads, and the literal per-rollout loops that the trainers are held against."""

import torch

from eyas.data.loader import Batch
from eyas.drafters.artifact import make_model
from eyas.drafters.head_config import HeadConfig
from eyas.nn.packed import PackedContext
from eyas.training.rows import draft_rows
from tiny import tiny_config


def make_batch(lengths, seq_len, *, prompt=2, vocab=64, seed=0):
    """Rows of documents; the first `prompt` tokens of each document are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), seq_len)
    ids = torch.randint(1, vocab - 2, size, generator=generator, dtype=torch.int32)
    segments = torch.full(size, -1, dtype=torch.int32)
    positions = torch.zeros(size, dtype=torch.int32)
    supervised = torch.zeros(size, dtype=torch.bool)
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents):
            place = slice(start, start + length)
            segments[row, place] = number
            positions[row, place] = torch.arange(length, dtype=torch.int32)
            supervised[row, start + prompt : start + length] = True
            start += length
        assert start <= seq_len
    return Batch(ids, segments, positions, supervised)


def make_head(kind, *, dtype=torch.float64, seed=1, draft_vocab_size=40, **overrides):
    """A head of hidden size 32 with weights large enough to matter."""
    torch.manual_seed(seed)
    target = tiny_config()
    if kind == "peagle":
        overrides = {"num_layers": 2, "mask_token_id": 63} | overrides
    config = HeadConfig.for_target(target, kind=kind, draft_vocab_size=draft_vocab_size, **overrides)
    model = make_model(config, 0.3 * torch.randn(target.vocab_size, target.hidden_size))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    return model.to(dtype)


def make_features(batch, model, seed=2):
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch.ids.shape, model.config.feature_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.fc.weight.dtype)


def causal(length):
    return PackedContext.of(torch.zeros(1, length, dtype=torch.int32))


def rollouts(batch, depths):
    """(row, first index of the document, anchor, depth) of every slot whose guess stays in its document."""
    for row in range(batch.ids.shape[0]):
        segments = batch.segments[row].tolist()
        for anchor, segment in enumerate(segments):
            for depth in range(depths):
                last = anchor + depth + 2
                if segment >= 0 and last < len(segments) and segments[last] == segment:
                    yield row, segments.index(segment), anchor, depth


def naive_eagle3(model, batch, features, row, first, anchor, depth, guess_ids=None):
    """One rollout as decoding would do it, one token after the other; returns normed [D] of its last step.

    With `guess_ids` the tokens past the anchor's are the head's own guesses, not the text's.
    """
    ids = batch.ids[row].long().clone()
    hidden = model.fuse(features[row, first : anchor + 1])
    for step in range(depth + 1):
        length = anchor - first + 1 + step
        tokens = ids[first + 1 : first + 1 + length]
        normed, feedback = model(
            model.embed(tokens)[None], hidden[None], torch.arange(length)[None], causal(length)
        )
        hidden = torch.cat((hidden, feedback[0, -1:]))
        if guess_ids is not None and step < depth:
            ids[anchor + step + 2] = guess_ids[int(model.logits(normed[0, -1]).argmax())]
    return normed[0, -1]


def naive_peagle(model, batch, features, row, first, anchor, depth):
    """Real rows up to the anchor, then `depth` mask rows, plain causal attention."""
    ids = batch.ids[row].long()
    tokens = torch.cat((ids[first + 1 : anchor + 2], torch.full((depth,), model.mask_token_id)))
    masked = model.mask_hidden.expand(depth, -1)
    if model.config.encoded_depths:
        which = [min(k, model.config.encoded_depths) - 1 for k in range(1, depth + 1)]
        masked = masked + model.depth_encoding[which]
    stacked = torch.cat((features[row, first : anchor + 1], masked))
    length = tokens.numel()
    normed, _ = model(
        model.embed(tokens)[None], model.fuse(stacked)[None], torch.arange(length)[None], causal(length)
    )
    return normed[0, -1]


def rows_of(batch):
    return draft_rows(batch)

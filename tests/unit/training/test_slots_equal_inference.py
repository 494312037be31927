"""A slot in training and the same slot in decoding, through the paged cache: the same logits at every depth.

Decoding: prefill in chunks, then two rounds of `propose` with padding rows, at T = 1 so that q shows logits.
Training: one packed row whose document is the prefix and what the drafter guessed.
"""

import pytest
import torch
from slot_helpers import make_head

from eyas.core.batch import Committed
from eyas.core.vocab_map import VocabMap
from eyas.data.loader import Batch
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.kernels.reference.random import uniform
from eyas.nn.paged import allocate_cache
from eyas.training.objectives.eagle3 import Eagle3Objective
from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.rows import draft_rows, shift_features
from eyas.training.slots import previous_tokens

K, PAGE, LIMIT = 4, 4, 48


def committed(ids, features, start, count, rows):
    """Rows start .. start + count - 1 of each request, and leftovers up to `rows`."""
    index = torch.arange(rows) + start
    tokens = ids[:, (index + 1).clamp(max=ids.shape[1] - 1)].clone()
    tokens[:, count:] = 7  # rejected drafts: valid ids that must not matter
    feats = features[:, index.clamp(max=features.shape[1] - 1)].clone()
    feats[:, count:] = 99.0
    requests = ids.shape[0]
    return Committed(
        tokens=tokens,
        features=feats,
        start=torch.full((requests,), start),
        counts=torch.full((requests,), count),
        page_table=torch.tensor([[3, 9, 1, 12, 4, 6], [2, 8, 5, 10, 7, 11]], dtype=torch.int32),
        history=ids,
        max_position=LIMIT,
        temperature=torch.ones(requests),
        seeds=torch.tensor([5, 6]),
    )


def training_probs(model, objective, ids, features, anchor, vocab_map):
    """softmax over the draft vocabulary of slots (anchor, 0 .. K - 1), [requests, K, Vd]."""
    length = ids.shape[1]
    # A neighbour in front of the document: neither its tokens nor its length may matter.
    lead = 5
    pad = torch.nn.functional.pad
    batch = Batch(
        ids=pad(ids, (lead, 0), value=3).int(),
        segments=pad(torch.ones_like(ids), (lead, 0)).int(),
        positions=torch.cat((torch.arange(lead), torch.arange(length))).expand(2, -1).int(),
        supervised=torch.ones(2, lead + length, dtype=torch.bool),
    )
    rows = draft_rows(batch)
    stacked = torch.cat((torch.randn(2, lead, features.shape[-1]), features), dim=1)
    slots = objective.all_slots(rows)
    normed = objective.forward(model, rows, shift_features(batch, stacked), slots)
    weight = model.lm_head.weight
    if model.config.markov_form == "hidden":
        previous = previous_tokens(slots, rows)
        token_part = model.markov.token(model.embed(previous.clamp(min=0)))
        normed = model.markov.corrected(normed, token_part, previous >= 0)
    elif model.config.markov_rank:
        previous = previous_tokens(slots, rows)
        known = torch.where(previous >= 0, vocab_map.draft_ids(previous.clamp(min=0)), -1)
        normed, weight = model.markov.joined(normed, weight, known)
    wanted = slots.anchors == anchor + lead
    picked = normed[wanted].view(2, -1, normed.shape[-1])
    assert slots.depths.expand_as(wanted)[wanted].view(2, -1)[0].tolist() == list(range(K))
    return torch.softmax(picked @ weight.T, -1)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("eagle3", {}),
        ("eagle3", {"fc_norm": True, "norm_output": True}),
        ("peagle", {}),
        ("peagle", {"fc_norm": True, "norm_output": True}),
        *(("peagle", {"encoded_depths": depths}) for depths in (2, 3, 5)),
        ("peagle", {"encoded_depths": 3, "fc_norm": True, "markov_rank": 5, "markov_form": "hidden"}),
        ("peagle", {"markov_rank": 5}),
        ("peagle", {"markov_rank": 5, "markov_form": "hidden"}),
        ("peagle", {"markov_rank": 5, "markov_form": "hidden", "fc_norm": True, "norm_output": True}),
    ],
)
def test_training_logits_equal_inference_logits(kind, flags):
    torch.manual_seed(0)
    model = make_head(kind, dtype=torch.float32, **flags)
    vocab_map = VocabMap(torch.randperm(60)[:40].sort().values, 64)
    build = Eagle3Drafter if kind == "eagle3" else PEagleDrafter
    drafter = build(model, vocab_map, K, sample_drafts=True, uniform=uniform)
    objective = Eagle3Objective(steps=K) if kind == "eagle3" else PEagleObjective(num_depths=K)
    drafter.bind(allocate_cache(drafter.kv_layout, 13, PAGE, dtype=torch.float32, device="cpu"), LIMIT)
    # Tokens and features of 11 known positions; rows pair token j + 1 with feature j.
    ids = torch.randint(1, 60, (2, 12))
    features = torch.randn(2, 12, model.config.feature_size)
    drafter.prefill(committed(ids, features, 0, 3, 3))
    drafter.prefill(committed(ids, features, 3, 2, 3))
    for start, count in ((5, 2), (7, 3)):
        draft = drafter.propose(committed(ids, features, start, count, 4))
        anchor = start + count - 1
        # The document as that round saw it: known tokens, then what the drafter itself guessed.
        text = torch.cat((ids[:, : anchor + 2], draft.tokens), dim=1)
        known = torch.nn.functional.pad(features[:, : anchor + 1], (0, 0, 0, K + 1))
        with torch.no_grad():
            expected = training_probs(model, objective, text, known, anchor, vocab_map)
        torch.testing.assert_close(vocab_map.restrict(draft.probs), expected, rtol=2e-5, atol=1e-6)
        assert expected.max() > 0.1  # a flat distribution would not show a difference

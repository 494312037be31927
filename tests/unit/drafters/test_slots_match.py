"""Training and inference see the same slots: logits over (anchor, depth) equal those of propose()."""

import drafter_rounds
import pytest
import torch

from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.nn.packed import SlotContext


def eagle3_slots(model, tokens, features, anchors, rollouts):
    """The training-time test written with slots: depth k is fed depth k - 1's output of its own anchor.

    rollouts {anchor: tokens of depths 1 ..}; returns {anchor: logits [K, Vd]}. Slots of depth k can only be
    computed after those of depth k - 1, so the whole set of slots is run again for each depth.
    """
    known = len(tokens) - 1
    depth_of = [0] * known
    anchor_of = list(range(known))
    embeddings = model.embed(torch.tensor(tokens[1:]))
    hidden = model.fuse(features)
    place = {anchor: anchor for anchor in anchors}
    logits = {anchor: [] for anchor in anchors}
    for depth in range(len(rollouts[anchors[0]])):
        a, k = torch.tensor(anchor_of)[None], torch.tensor(depth_of)[None]
        context = SlotContext.of(a, k, torch.zeros_like(a))
        normed, feedback = model(embeddings[None], hidden[None], a + k, context)
        fed = []
        for anchor in anchors:
            logits[anchor].append(model.logits(normed[0, place[anchor]]))
            fed.append(feedback[0, place[anchor]])
        for i, anchor in enumerate(anchors):
            place[anchor] = len(anchor_of)
            anchor_of.append(anchor)
            depth_of.append(depth + 1)
            hidden = torch.cat((hidden, fed[i][None]))
            token = torch.tensor([rollouts[anchor][depth]])
            embeddings = torch.cat((embeddings, model.embed(token)))
    return {anchor: torch.stack(rows) for anchor, rows in logits.items()}


def peagle_slots(model, tokens, features, anchors, num_depths):
    """All slots in one forward; depth-major order, as the trainer packs them."""
    known = len(tokens) - 1
    slots = [(a, 0) for a in range(known)]
    slots += [(a, k) for k in range(1, num_depths) for a in anchors]
    a, k = torch.tensor(slots).T
    masked = torch.stack([masked_hidden(model, depth) for _, depth in slots[known:]])
    real = torch.cat((model.fuse(features), model.fuse(masked)))
    ids = torch.tensor(tokens[1:] + [model.mask_token_id] * (len(slots) - known))
    context = SlotContext.of(a[None], k[None], torch.zeros_like(a)[None])
    normed, _ = model(model.embed(ids)[None], real[None], (a + k)[None], context)
    logits = model.logits(normed[0])
    return {
        anchor: torch.stack([logits[slots.index((anchor, depth))] for depth in range(num_depths)])
        for anchor in anchors
    }


def masked_hidden(model, depth):
    """What stands in for the features of a slot at `depth` past 0."""
    encoded = model.config.encoded_depths
    return model.mask_hidden + (model.depth_encoding[min(depth, encoded) - 1] if encoded else 0)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        *(
            (kind, flags)
            for kind in ("eagle3", "peagle")
            for flags in ({}, {"fc_norm": True, "norm_output": True})
        ),
        *(("peagle", {"encoded_depths": depths}) for depths in (2, 6, 9)),
        ("peagle", {"encoded_depths": 6, "norm_before_fc": True, "norm_before_residual": True}),
    ],
    ids=str,
)
def test_training_slots_equal_inference(kind, flags):
    k = 7
    model, vocab_map = drafter_rounds.head(kind, scale=0.2, **flags)
    drafter = (PEagleDrafter if kind == "peagle" else Eagle3Drafter)(model, vocab_map, k)
    seen = []
    real = model.guess

    def guess(hidden, index_map):
        seen.append(model.logits(model.norm(hidden)))
        return real(hidden, index_map)

    model.guess = guess
    sim = drafter_rounds.Rounds(drafter, lengths=[3, 8])
    sim.prefill(chunk=3)
    rolled = [{}, {}]
    wanted = [{}, {}]
    for accepted in ([0, 3], [2, 0], [k, 1]):
        seen.clear()
        draft = sim.round(accepted, k)
        logits = torch.cat(seen, dim=1)
        for b in range(2):
            anchor = len(sim.tokens[b]) - 2  # the last position whose feature is known
            rolled[b][anchor], wanted[b][anchor] = draft.tokens[b].tolist(), logits[b]

    for b in range(2):
        anchors, known = list(rolled[b]), len(sim.tokens[b]) - 1
        assert len(anchors) == 3
        features = sim.features[b][:known]
        if kind == "peagle":
            trained = peagle_slots(model, sim.tokens[b], features, anchors, k)
        else:
            trained = eagle3_slots(model, sim.tokens[b], features, anchors, rolled[b])
        for anchor in anchors:
            torch.testing.assert_close(trained[anchor], wanted[b][anchor], rtol=1e-5, atol=1e-5)

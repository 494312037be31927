import drafter_rounds
import naive_head
import pytest
import torch

from eyas.drafters import head_drafter
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.peagle.propose import PEagleDrafter

FLAGS = [
    {},
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "attention_bias": True},
    {"fc_norm": True, "qk_norm": True, "num_layers": 2},
]


def make(kind, num_draft_tokens, **flags):
    model, vocab_map = drafter_rounds.head(kind, **flags)
    drafter_rounds.in_double(model)
    drafter = (PEagleDrafter if kind == "peagle" else Eagle3Drafter)(model, vocab_map, num_draft_tokens)
    seen = []
    real = model.guess

    def guess(hidden, index_map):
        seen.append(model.logits(model.norm(hidden)))
        return real(hidden, index_map)

    model.guess = guess
    return drafter, naive_head.NaiveHead(model), vocab_map, seen


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        *((kind, flags) for kind in ("eagle3", "peagle") for flags in FLAGS),
        *(("peagle", {"encoded_depths": 6, **flags}) for flags in FLAGS),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7, 15])
def test_drafts_equal_recomputing_everything(kind, flags, num_draft_tokens):
    drafter, reference, vocab_map, seen = make(kind, num_draft_tokens, **flags)
    sim = drafter_rounds.Rounds(drafter, lengths=[1, 9, 14], dtype=torch.float64)
    sim.prefill(chunk=5)
    assert seen == []  # prefill computes no logits

    k = num_draft_tokens
    for accepted in ([0, k, k // 2], [k, 0, 1], [k // 3, k // 2, 0]):
        seen.clear()
        draft = sim.round(accepted, k)
        logits = torch.cat(seen, dim=1)

        assert draft.probs is None
        for b in range(sim.num):
            m = len(sim.tokens[b]) - 1
            guesses, wanted = reference.draft(sim.tokens[b], sim.features[b][:m], k, vocab_map.target_ids)
            torch.testing.assert_close(logits[b], wanted, rtol=1e-8, atol=1e-8)
            assert draft.tokens[b].tolist() == guesses


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_request_at_the_context_limit_leaves_its_neighbour_alone(kind):
    k = 7
    drafter, reference, vocab_map, _ = make(kind, k)
    sim = drafter_rounds.Rounds(drafter, lengths=[22, 5], max_len=24, dtype=torch.float64)
    sim.prefill(chunk=8)
    draft = sim.round([0, 2], k)  # request 0 stands at position 22 of 24

    for b, num_inside in ((0, 1), (1, k)):
        m = len(sim.tokens[b]) - 1
        guesses, _ = reference.draft(sim.tokens[b], sim.features[b][:m], k, vocab_map.target_ids)
        # What would stand past the limit can never be committed.
        assert draft.tokens[b].tolist()[:num_inside] == guesses[:num_inside]


@pytest.mark.parametrize(("kind", "guess_rows"), [("eagle3", 1), ("peagle", 7)])
def test_the_last_layer_multiplies_only_rows_that_guess(kind, guess_rows, monkeypatch):
    """Three requests of 8 rows and more; one with few in all is not worth a gather."""
    k, drafts, multiplied = 7, [], []
    for few in (16, 10_000):
        monkeypatch.setattr(head_drafter, "FEW_ROWS", few)
        drafter, _, _, _ = make(kind, k)
        drafter.model.layers[-1].mlp.register_forward_pre_hook(
            lambda _, given: multiplied.append(given[0].shape[:-1].numel())
        )
        sim = drafter_rounds.Rounds(drafter, lengths=[1, 9, 14], dtype=torch.float64)
        sim.prefill(chunk=5)
        multiplied.clear()
        drafts.append(sim.round([0, k, 3], k).tokens)
        all_rows = 3 * (k + 1 + guess_rows - 1)
        assert multiplied[0] == (3 * guess_rows if few == 16 else all_rows)
    assert torch.equal(*drafts)


@pytest.mark.parametrize(
    ("kind", "flags"), [(kind, flags) for kind in ("eagle3", "peagle") for flags in FLAGS], ids=str
)
def test_packed_rows_draft_the_same(kind, flags, monkeypatch):
    """Rejected drafts' rows after all others, from the features to the cache; a request at the limit, too."""
    k, drafts, caches, logits = 5, [], [], []
    for packs in (False, True):
        monkeypatch.setattr(head_drafter, "_packs", lambda _, packs=packs: packs)
        drafter, _, _, seen = make(kind, k, **flags)
        sim = drafter_rounds.Rounds(drafter, lengths=[1, 9, 14, 22], max_len=28, dtype=torch.float64)
        sim.prefill(chunk=5)
        seen.clear()
        drafts += [sim.round(accepted, k).tokens for accepted in ([0, k, 2, 1], [k, 0, 1, 0])]
        logits.append(torch.cat(seen, 1))
        caches.append([*sim.cache.keys, *sim.cache.values])
    assert torch.equal(drafts[0], drafts[2])
    assert torch.equal(drafts[1], drafts[3])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-12)
    for one, other in zip(*caches, strict=True):
        # Page 0 is scratch.
        torch.testing.assert_close(one[1:], other[1:], rtol=1e-12, atol=1e-12)


def test_a_head_made_in_inference_mode_drafts():
    with torch.inference_mode():
        drafter, _, _, _ = make("peagle", 3)
        sim = drafter_rounds.Rounds(drafter, lengths=[4], dtype=torch.float64)
        sim.prefill(chunk=4)
        assert sim.round([1], 3).tokens.shape == (1, 3)

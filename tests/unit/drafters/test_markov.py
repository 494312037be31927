"""The correction by the token before, both forms, against the formulas written out depth after depth."""

from dataclasses import replace

import drafter_rounds
import naive_head
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.choose import draw
from eyas.drafters.peagle.markov import MarkovTables
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.drafters.peagle.propose_tree import PEagleTreeDrafter
from eyas.kernels.reference import step_markov
from eyas.kernels.reference.random import uniform

FORMS = pytest.mark.parametrize("form", ["tables", "hidden"])


def make(form, *, double=True, **flags):
    model, vocab_map = drafter_rounds.head("peagle", markov_rank=6, markov_form=form, **flags)
    return (drafter_rounds.in_double(model) if double else model), vocab_map


def drafts(drafter, *, dtype=torch.float64, rounds=([0, 4, 2], [4, 0, 1])):
    """(draft, the requests as they stood) of a few rounds."""
    sim = drafter_rounds.Rounds(drafter, lengths=[1, 9, 14], dtype=dtype)
    sim.prefill(chunk=5)
    for accepted in rounds:
        yield sim.round(accepted, drafter.num_draft_tokens), sim


@FORMS
@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True, "draft_vocab_size": 64}])
def test_chains_are_those_of_the_written_out_formulas(form, flags):
    model, vocab_map = make(form, **flags)
    reference, k = naive_head.NaiveHead(model), 5
    plain = naive_head.NaiveHead(model)
    corrected = 0
    for draft, sim in drafts(PEagleDrafter(model, vocab_map, k)):
        assert draft.probs is None
        for b in range(sim.num):
            known = sim.tokens[b], sim.features[b][: len(sim.tokens[b]) - 1]
            guesses, logits = reference.draft(*known, k, vocab_map.target_ids)
            assert draft.tokens[b].tolist() == guesses
            plain.config = base_config(model)
            uncorrected, without = plain.draft(*known, k, vocab_map.target_ids)
            assert uncorrected[0] == guesses[0]
            torch.testing.assert_close(without[0], logits[0])
            corrected += sum(a != b for a, b in zip(uncorrected, guesses, strict=True))
    assert corrected > 5  # a correction that never matters would show nothing


def base_config(model):
    return replace(model.config, markov_rank=0, markov_form="tables")


@FORMS
def test_q_of_a_sampled_chain_follows_its_own_draws(form):
    model, vocab_map = make(form)
    reference, k = naive_head.NaiveHead(model), 4
    drafter = PEagleDrafter(model, vocab_map, k, sample_drafts=True, uniform=uniform)
    real, temperatures = drafter.propose, torch.tensor([0.0, 0.7, 1.5])

    def propose(committed):
        committed.temperature = temperatures
        return real(committed)

    drafter.propose = propose
    for draft, sim in drafts(drafter):
        for b, temperature in enumerate(temperatures.tolist()):
            m, guesses = len(sim.tokens[b]) - 1, draft.tokens[b].tolist()
            _, logits = reference.draft(
                sim.tokens[b], sim.features[b][:m], k, vocab_map.target_ids, forced=guesses
            )
            wanted = torch.zeros(k, 64)
            if temperature == 0:
                best = vocab_map.target_ids[logits.argmax(-1)]
                assert guesses == best.tolist()
                wanted[torch.arange(k), best] = 1.0
            else:
                wanted[:, vocab_map.target_ids] = (logits / temperature).softmax(-1).float()
                numbers = uniform(torch.full((k,), b + 7), m + 1 + torch.arange(k), 3)
                assert guesses == draw(wanted, numbers).tolist()
            torch.testing.assert_close(draft.probs[b], wanted, rtol=1e-5, atol=1e-6)


@FORMS
def test_neighbours_do_not_matter(form):
    model, vocab_map = make(form, double=False)
    k = 5
    drafter = PEagleDrafter(model, vocab_map, k)
    ((together, sim),) = drafts(drafter, dtype=torch.float32, rounds=([0, 4, 2],))
    for b, length in enumerate([1, 9, 14]):
        alone = drafter_rounds.Rounds(PEagleDrafter(model, vocab_map, k), lengths=[length])
        alone.tokens, alone.features = [sim.tokens[b][:length]], [sim.features[b][:length]]
        alone.prefill(chunk=5)
        count = len(sim.tokens[b]) - length
        alone.random_tokens = lambda n, b=b, at=length: sim.tokens[b][at : at + n]
        alone.random_features = lambda n, b=b, at=length: sim.features[b][at : at + n]
        assert alone.round([count - 1], k).tokens[0].tolist() == together.tokens[b].tolist()


class NoReads(TorchDispatchMode):
    """Raises where the host would wait for a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "equal"}, func
        return func(*args, **(kwargs or {}))


@FORMS
@pytest.mark.parametrize("sample", [False, True])
def test_no_value_is_read_back(form, sample, monkeypatch):
    """What comes after the layers may stand in a CUDA graph, as they do; there is no way in passes there."""
    monkeypatch.setattr(step_markov, "guess_in_passes", step_markov.markov_guess)
    model, vocab_map = make(form, double=False)
    drafter = PEagleDrafter(model, vocab_map, 4, sample_drafts=sample, uniform=uniform)
    sim = drafter_rounds.Rounds(drafter, lengths=[3, 6])
    committed, hidden = sim.committed([1, 4], [1, 1], 5), torch.randn(2, 4, 32)
    with NoReads(), torch.no_grad():
        tables = MarkovTables(*drafter._correction.get())
        assert drafter._propose_corrected(hidden, committed, tables).tokens.shape == (2, 4)


@FORMS
def test_tables_follow_their_weights_in_place(form):
    model, vocab_map = make(form, double=False)
    drafter = PEagleDrafter(model, vocab_map, 3)
    drafter_rounds.Rounds(drafter, lengths=[3])
    first = drafter._correction.get()
    before, places = [x.clone() for x in first], [x.data_ptr() for x in first]
    with torch.no_grad():
        for parameter in model.markov.parameters():
            parameter.mul_(1.5)
    again = drafter._correction.get()
    assert [x.data_ptr() for x in again] == places  # a captured graph reads the same memory
    assert not any(torch.equal(x, y) for x, y in zip(again, before, strict=True))
    for kept, made in zip(again, model.markov_tables(vocab_map.target_ids), strict=True):
        assert torch.equal(kept, made)


@FORMS
def test_a_new_correction_changes_no_guess(form):
    model, vocab_map = drafter_rounds.head("peagle")
    before = [draft.tokens for draft, _ in drafts(PEagleDrafter(model, vocab_map, 5), dtype=torch.float32)]
    model.add_markov(form, 4, generator=torch.Generator().manual_seed(0))
    assert (model.config.markov_form, model.config.markov_rank) == (form, 4)
    after = [draft.tokens for draft, _ in drafts(PEagleDrafter(model, vocab_map, 5), dtype=torch.float32)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    model.remove_markov()
    assert model.markov is None
    assert model.config.markov_rank == 0


def test_half_of_a_new_state_comes_from_each_side():
    model, _ = drafter_rounds.head("peagle", scale=0.05)
    generator = torch.Generator().manual_seed(5)
    model.add_markov("hidden", 32, generator=generator)
    normed = torch.randn(500, 32, generator=generator) * model.norm.weight
    for part in (model.markov.hidden(normed), model.markov.token(model.embed_weight)):
        assert 0.4 < part.square().mean().item() < 0.6


@FORMS
def test_trees_read_the_marginals(form):
    budget = TreeBudget(depth=3, top_k=3, num_draft_tokens=9)
    model, vocab_map = make(form)
    found = [
        (draft.tokens, draft.parents) for draft, _ in drafts(PEagleTreeDrafter(model, vocab_map, budget))
    ]
    model.remove_markov()
    base = [(draft.tokens, draft.parents) for draft, _ in drafts(PEagleTreeDrafter(model, vocab_map, budget))]
    for mine, theirs in zip(found, base, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"markov_form": "hidden"},
            "markov_form='hidden': it must be left out where there is no markov_rank",
        ),
        ({"markov_rank": 41}, r"markov_rank=41: it must be 0 \.\. 40"),
        ({"markov_form": "hidden", "markov_rank": 129}, r"markov_rank=129: it must be 0 \.\. 128"),
        ({"markov_form": "wide", "markov_rank": 3}, 'markov_form=\'wide\': it must be "tables" or "hidden"'),
    ],
)
def test_forms_are_checked(flags, message):
    with pytest.raises(ConfigError, match=message):
        drafter_rounds.head("peagle", **flags)

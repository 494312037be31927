import drafter_rounds
import naive_head
import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.drafters.choose import DRAFT_STREAM, draw
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.drafters.small_model.propose import SmallModelDrafter
from tiny import tiny_target


def uniform(seeds, positions, stream):
    """A number for every (seed, position); equal arguments give equal numbers."""
    assert stream == DRAFT_STREAM
    mixed = (seeds * 1000003 + positions * 7919 + 12345) * 2654435761 % 1000000007
    return (mixed.double() + 0.5) / 1000000007


def test_draw_is_an_inverse_cdf():
    probs = torch.tensor([0.25, 0.0, 0.75, 0.0])
    numbers = torch.tensor([1e-9, 0.2, 0.25, 0.9, 1 - 1e-16], dtype=torch.float64)

    assert draw(probs.expand(5, 4), numbers).tolist() == [0, 0, 2, 2, 2]

    many = torch.rand(20000, 16, generator=torch.Generator().manual_seed(0)).softmax(-1)[:1].expand(20000, -1)
    ids = draw(many, uniform(torch.arange(20000), torch.zeros(20000, dtype=torch.int64), DRAFT_STREAM))
    share = torch.bincount(ids, minlength=16) / 20000
    # Six standard errors of the largest share.
    assert float((share - many[0]).abs().max()) < 6 * (0.25 / 20000) ** 0.5


def with_temperature(drafter, temperatures):
    """The drafter with the temperatures of the batch set on every call."""
    real = drafter.propose

    def propose(committed):
        committed.temperature = torch.tensor(temperatures)
        return real(committed)

    drafter.propose = propose
    return drafter


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_q_is_what_the_head_says_along_its_own_draws(kind):
    k, temperatures = 4, [0.0, 0.7, 1.5]
    model, vocab_map = drafter_rounds.head(kind)
    drafter_rounds.in_double(model)
    make = PEagleDrafter if kind == "peagle" else Eagle3Drafter
    drafter = with_temperature(make(model, vocab_map, k, sample_drafts=True, uniform=uniform), temperatures)
    sim = drafter_rounds.Rounds(drafter, lengths=[2, 5, 9], dtype=torch.float64)
    sim.prefill(chunk=4)
    reference = naive_head.NaiveHead(model)
    for accepted in ([0, 2, 4], [4, 1, 0]):
        draft = sim.round(accepted, k)

        assert draft.probs.shape == (3, k, 64)
        for b, temperature in enumerate(temperatures):
            m = len(sim.tokens[b]) - 1
            guesses = draft.tokens[b].tolist()
            _, logits = reference.draft(
                sim.tokens[b], sim.features[b][:m], k, vocab_map.target_ids, forced=guesses
            )
            best = vocab_map.target_ids[logits.argmax(-1)]
            wanted = torch.zeros(k, 64)
            if temperature == 0:
                assert guesses == best.tolist()
                wanted[torch.arange(k), best] = 1.0
            else:
                wanted[:, vocab_map.target_ids] = (logits / temperature).softmax(-1).float()
                # Each guess is the inverse CDF of its own (seed, position): depth i stands at m + 1 + i.
                seeds, positions = torch.full((k,), b + 7), m + 1 + torch.arange(k)
                numbers = uniform(seeds, positions, DRAFT_STREAM)
                assert guesses == draw(wanted, numbers).tolist()
            torch.testing.assert_close(draft.probs[b], wanted, rtol=1e-5, atol=1e-6)


def test_a_small_model_samples_too_and_neighbours_do_not_matter():
    target, k = tiny_target(seed=5), 3

    def run(lengths, temperatures):
        drafter = SmallModelDrafter(
            target.decoder, k, small_vocab_size=64, vocab_size=64, sample_drafts=True, uniform=uniform
        )
        sim = drafter_rounds.Rounds(with_temperature(drafter, temperatures), lengths, features=False)
        sim.prefill(chunk=4)
        return sim.round([0] * len(lengths), k), sim

    draft, sim = run([6, 3], [0.9, 0.0])
    assert torch.all(draft.probs.gather(2, draft.tokens[..., None]) > 0)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(2, k))
    assert draft.probs[1].max(-1).values.tolist() == [1.0] * k

    drafter = SmallModelDrafter(
        target.decoder, k, small_vocab_size=64, vocab_size=64, sample_drafts=True, uniform=uniform
    )
    alone = drafter_rounds.Rounds(with_temperature(drafter, [0.9]), [6], features=False)
    alone.tokens = [sim.tokens[0][:6]]
    alone.prefill(chunk=4)
    alone.random_tokens = lambda n: sim.tokens[0][6 : 6 + n]
    assert alone.round([0], k).tokens[0].tolist() == draft.tokens[0].tolist()


def test_sampling_needs_random_numbers():
    model, vocab_map = drafter_rounds.head("eagle3")
    with pytest.raises(ConfigError, match="sample_drafts"):
        Eagle3Drafter(model, vocab_map, 2, sample_drafts=True)

import drafter_rounds
import pytest
import torch

from eyas.core.errors import HeadMismatchError
from eyas.drafters.small_model.propose import SmallModelDrafter
from eyas.nn.packed import PackedContext
from tiny import tiny_target


def drafter(target, k, **options):
    size = target.config.vocab_size
    return SmallModelDrafter(target.decoder, k, small_vocab_size=size, vocab_size=size, **options)


def greedy(target, tokens, num_tokens):
    """Generate without a cache: the whole text again for every token."""
    tokens, out = list(tokens), []
    for _ in range(num_tokens):
        ids = torch.tensor([tokens])
        context = PackedContext.of(torch.zeros_like(ids))
        hidden, _ = target.decoder(ids, torch.arange(len(tokens))[None], context)
        out.append(int(target.decoder.logits(hidden[0, -1]).argmax()))
        tokens.append(out[-1])
    return out


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("k", [1, 5])
def test_drafts_are_the_small_models_own_greedy_text(family, k):
    target = tiny_target(family, seed=3)
    sim = drafter_rounds.Rounds(drafter(target, k), lengths=[1, 2, 11], features=False)
    sim.prefill(chunk=4)
    for accepted in ([0, k, 0], [k, 0, k // 2], [0, 0, 0], [1, k, k]):
        draft = sim.round(accepted, k)

        assert draft.tokens.tolist() == [greedy(target, tokens, k) for tokens in sim.tokens]


def test_vocabularies_may_differ_by_padding_only():
    target = tiny_target(vocab_size=64)
    with pytest.raises(HeadMismatchError, match=r"64 tokens, the target 32000"):
        SmallModelDrafter(target.decoder, 2, small_vocab_size=64, vocab_size=32000)

    padded = SmallModelDrafter(target.decoder, 3, small_vocab_size=64, vocab_size=60)
    sim = drafter_rounds.Rounds(padded, lengths=[4], features=False)
    sim.tokens = [[min(t, 59) for t in tokens] for tokens in sim.tokens]
    assert int(sim.round([0], 3).tokens.max()) < 60

    wider = SmallModelDrafter(tiny_target(vocab_size=50).decoder, 3, small_vocab_size=50, vocab_size=64)
    sim = drafter_rounds.Rounds(wider, lengths=[4], features=False)
    sim.tokens = [[63, 60, 51, 52]]  # ids that the small model does not have must not crash it
    assert int(sim.round([0], 3).tokens.max()) < 50

"""Both verification rules against plain loops, and the algebra of the rejection rule."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import naive_sampling
from eyas.core.vocab_map import VocabMap
from eyas.verify.greedy import accept_by_match
from eyas.verify.rejection import accept_drafts, reject_sampled, residual

ROWS = st.integers(0, 2**32)


def random_probs(generator, *size):
    """Rows of very different sharpness, some tokens with probability zero."""
    logits = torch.randn(*size, generator=generator) * torch.rand(*size[:-1], 1, generator=generator) * 4
    zero = torch.rand(*size, generator=generator) < 0.25
    zero[..., 0] = False
    return logits.masked_fill(zero, float("-inf")).softmax(-1)


def naive_match(choices, drafts):
    out = []
    for i, choice in enumerate(choices):
        out.append(choice)
        if i == len(drafts) or drafts[i] != choice:
            break
    return out


@given(ROWS, st.integers(0, 5))
def test_match_equals_loop(seed, num_drafts):
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 3, (4, num_drafts + 1), generator=generator)
    drafts = torch.randint(-1, 3, (4, num_drafts), generator=generator)

    tokens, counts = accept_by_match(choices, drafts)

    for row in range(4):
        expected = naive_match(choices[row].tolist(), drafts[row].tolist())
        assert tokens[row, : counts[row]].tolist() == expected


def naive_reject(p, q, drafts, seed, positions):
    """One request, one scalar at a time."""
    out = []
    for i, draft in enumerate(drafts):
        position = positions[i]
        if draft < 0:
            return [*out, naive_sampling.draw(p[i], naive_sampling.uniform(seed, position, 0))]
        if p[i][draft] == 0 or naive_sampling.uniform(seed, position, 1) * q[i][draft] >= p[i][draft]:
            left = [max(a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
            weights = left if sum(left) > 0 else p[i]
            return [*out, naive_sampling.draw(weights, naive_sampling.uniform(seed, position, 2))]
        out.append(draft)
    last = len(drafts)
    return [*out, naive_sampling.draw(p[last], naive_sampling.uniform(seed, positions[last], 0))]


@settings(deadline=None)
@given(ROWS, st.integers(0, 4), st.booleans())
def test_rejection_equals_loop(seed, num_drafts, alike):
    generator = torch.Generator().manual_seed(seed)
    batch, vocab = 6, 5
    p = random_probs(generator, batch, num_drafts + 1, vocab).double()
    q = random_probs(generator, batch, num_drafts, vocab).double()
    if alike:  # drafts good enough that long runs are accepted
        q = 0.9 * p[:, :-1] + 0.1 * q
    drafts = torch.multinomial(q.reshape(-1, vocab), 1, generator=generator) if num_drafts else q[..., 0]
    drafts = drafts.reshape(batch, num_drafts).long()
    drafts[torch.rand(drafts.shape, generator=generator) < 0.1] = -1
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    positions = torch.randint(0, 99, (batch, 1), generator=generator) + torch.arange(num_drafts + 1)

    tokens, counts = reject_sampled(p, q, drafts, seeds, positions)

    for row in range(batch):
        expected = naive_reject(
            p[row].tolist(), q[row].tolist(), drafts[row].tolist(), int(seeds[row]), positions[row].tolist()
        )
        assert tokens[row, : counts[row]].tolist() == expected
    assert ((tokens >= 0) & (tokens < vocab)).all()


@given(ROWS)
def test_one_step_yields_exactly_p(seed):
    """Sum over drafts of q(x) min(1, p(x)/q(x)), plus the residual's share, is p to 1e-6."""
    generator = torch.Generator().manual_seed(seed)
    p, q = random_probs(generator, 8).double(), random_probs(generator, 8).double()
    accept = torch.minimum(torch.ones(()), p / q).nan_to_num(0.0)
    out = q * accept + (1 - (q * accept).sum()) * residual(p, q)

    assert torch.allclose(out, p, atol=1e-6, rtol=0)
    # The rule accepts on exactly [0, min(1, p/q)).
    for x in range(8):
        edge = float(accept[x])
        for u in (edge * (1 - 1e-9), edge * (1 + 1e-9) + 1e-12):
            if q[x] > 0 and 0 < u < 1:
                uniforms = torch.tensor([[u]], dtype=torch.float64)
                said = accept_drafts(p.view(1, 1, 8), q.view(1, 1, 8), torch.tensor([[x]]), uniforms)
                assert bool(said) == (u < edge)


@given(ROWS)
def test_reduced_vocabulary_yields_exactly_p(seed):
    generator = torch.Generator().manual_seed(seed)
    p = random_probs(generator, 8).double()
    q = VocabMap(torch.tensor([1, 4, 6]), 8).scatter(random_probs(generator, 3).double())
    accept = torch.minimum(torch.ones(()), p / q).nan_to_num(0.0)
    out = q * accept + (1 - (q * accept).sum()) * residual(p, q)

    assert torch.allclose(out, p, atol=1e-6, rtol=0)


@given(ROWS)
def test_greedy_rows_accept_the_argmax_alone(seed):
    """p with all mass on one token makes the rejection rule the matching rule."""
    generator = torch.Generator().manual_seed(seed)
    q = random_probs(generator, 5, 3, 4)
    drafts = torch.multinomial(q.reshape(-1, 4), 1, generator=generator).reshape(5, 3)
    choices = torch.where(
        torch.rand(5, 4, generator=generator) < 0.7,
        torch.nn.functional.pad(drafts, (0, 1)),
        torch.randint(0, 4, (5, 4), generator=generator),
    )
    p = torch.nn.functional.one_hot(choices, 4).float()

    tokens, counts = reject_sampled(p, q, drafts, torch.arange(5), torch.arange(4).expand(5, 4))
    expected = accept_by_match(choices, drafts)

    assert torch.equal(counts, expected.counts)
    for row in range(5):
        assert torch.equal(tokens[row, : counts[row]], expected.tokens[row, : counts[row]])


def test_neighbours_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    p, q = random_probs(generator, 8, 4, 6), random_probs(generator, 8, 3, 6)
    drafts = torch.multinomial(q.reshape(-1, 6), 1, generator=generator).reshape(8, 3)
    seeds, positions = torch.arange(8) * 10, torch.arange(4).expand(8, 4) + torch.arange(8).unsqueeze(1)
    together = reject_sampled(p, q, drafts, seeds, positions)

    for row in range(8):
        one = slice(row, row + 1)
        alone = reject_sampled(p[one], q[one], drafts[one], seeds[one], positions[one])
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert alone.counts[0] == together.counts[row]


def test_equal_distributions_accept_everything():
    p = random_probs(torch.Generator().manual_seed(1), 64, 4, 6)
    drafts = p[:, :-1].argmax(-1)

    counts = reject_sampled(p, p[:, :-1], drafts, torch.arange(64), torch.arange(4).expand(64, 4)).counts

    assert (counts == 4).all()


def test_nan_row_harms_no_other():
    generator = torch.Generator().manual_seed(2)
    p, q = random_probs(generator, 3, 3, 5), random_probs(generator, 3, 2, 5)
    drafts = torch.multinomial(q.reshape(-1, 5), 1, generator=generator).reshape(3, 2)
    args = (torch.arange(3), torch.arange(3).expand(3, 3))
    good = reject_sampled(p, q, drafts, *args)
    p[1] = float("nan")
    broken = reject_sampled(p, q, drafts, *args)

    assert torch.equal(good.tokens[[0, 2]], broken.tokens[[0, 2]])
    assert ((broken.tokens >= 0) & (broken.tokens < 5)).all()

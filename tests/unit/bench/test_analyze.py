from dataclasses import replace

import pytest

from eyas.bench.analyze import Sample, best_per_spec, conditional, summarize


def sample(method, turn, prompt, seconds, ids=(1, 2, 3, 4), steps=3, accepted=(1, 1)):
    return Sample(
        method=method,
        round=turn,
        prompt_ids=(prompt,),
        seconds=seconds,
        tokens=len(ids),
        steps=steps,
        accepted_by_depth=accepted,
        draft_steps=steps - 1 if accepted else 0,
        token_ids=(tuple(ids),),
        verify_seconds=0.2,
        draft_seconds=0.1,
        overhead_seconds=0.02,
        batch_steps=steps,
    )


PLAIN = [sample("plain", r, p, 2.0, steps=4, accepted=()) for r in range(3) for p in "ab"]


def test_summary_against_hand_computed_numbers():
    times = {(0, "a"): 1.0, (0, "b"): 1.0, (1, "a"): 1.0, (1, "b"): 3.0, (2, "a"): 0.5, (2, "b"): 0.5}
    samples = [sample("head", r, p, t) for (r, p), t in times.items()]
    row = summarize("head", "heads/x", 2, samples, PLAIN)
    # Each round has 8 tokens; plain takes 4 s, the head 2, 4 and 1 s.
    assert (row.speedup_low, row.speedup, row.speedup_high) == (1.0, 2.0, 4.0)
    assert row.tokens_per_second == pytest.approx(24 / 7)
    # Each sample has three steps, the first without drafts; the others accept two drafts.
    assert row.acceptance_length == pytest.approx(1 + 12 / 12)
    assert row.tokens_per_forward == pytest.approx(24 / 18)
    assert row.acceptance_by_depth == pytest.approx([0.5, 0.5])
    assert row.conditional_acceptance_by_depth == pytest.approx([0.5, 1.0])
    assert (row.verify_ms, row.draft_ms, row.overhead_ms) == pytest.approx((200 / 3, 100 / 3, 20 / 3))
    assert (row.identical, row.num_identical, row.num_answers) == (True, 6, 6)


def test_speedup_is_a_ratio_of_rates_not_of_times():
    samples = [sample("head", r, p, 2.0, ids=(1, 2)) for r in range(3) for p in "ab"]
    assert summarize("head", "x", 2, samples, PLAIN).speedup == pytest.approx(0.5)


def test_one_different_token_is_seen():
    samples = [sample("head", r, p, 1.0) for r in range(3) for p in "ab"]
    samples[3] = replace(samples[3], token_ids=((1, 2, 3, 5),))
    row = summarize("head", "x", 2, samples, PLAIN)
    assert (row.identical, row.num_identical) == (False, 5)


def test_plain_against_itself():
    row = summarize("plain", None, 0, PLAIN, PLAIN)
    assert (row.speedup, row.acceptance_length, row.acceptance_by_depth) == (1.0, 1.0, [])


def test_conditional_never_divides_by_zero():
    assert conditional([4, 0, 0], 8) == [0.5, 0.0, 0.0]
    assert conditional([], 8) == []
    assert conditional([0], 0) == [0.0]


def test_best_k_of_each_head():
    plain = summarize("plain", None, 0, PLAIN, PLAIN)
    rows = [replace(plain, spec=s, num_draft_tokens=k, speedup=v) for s, k, v in
            [("a", 3, 1.2), ("a", 5, 1.5), ("b", 3, 1.4), ("a", 7, 1.1), ("b", 5, 1.3)]]  # fmt: skip
    assert [(r.spec, r.num_draft_tokens) for r in best_per_spec([plain, *rows])] == [("a", 5), ("b", 3)]

"""Pieces of running requests, put together, are the final output; nothing sent is ever taken back."""

import random

import pytest

from eyas.core.outputs import TokenLogprob
from eyas.core.sampling import SamplingParams
from eyas.engine.feed import GroupFeed
from eyas.engine.intake import Intake
from eyas.engine.postprocess import Postprocessor
from eyas.engine.results import request_output
from eyas.engine.stats import EngineStats
from fakes import PieceTokenizer

K = 3


def make_group(params, *, text=True, tokenizer=True):
    intake = Intake(
        tokenizer=PieceTokenizer() if tokenizer else None,
        vocab_size=64,
        max_len=100,
        num_draft_tokens=K,
        eos_token_ids=[0],
        seed=0,
    )
    group = intake.group([1, 20], params, text=text)
    return group, intake.decoder(params) if tokenizer else None


def run(group, feed, rng):
    """Random runs of tokens until all completions end; pieces as they come, by completion."""
    post = Postprocessor(K, EngineStats())
    pieces = {index: [] for index in range(len(group.requests))}
    for piece in feed.take():
        pieces[piece.index].append(piece)
    while not group.finished:
        live = [request for request in group.requests if request.finish_reason is None]
        report = []
        for _ in live:
            count = rng.randint(1, K + 1)
            # Few letters, so that stop strings appear; a blank before one; parts of a character.
            tokens = [rng.choice([8, 8, 9, 9, 10, 11, 46, 2, 3, 4, 5]) for _ in range(K + 1)]
            report.append([*tokens, count, K])
        post.apply(live, report)
        for request in live:
            if request.logprobs is not None:
                del request.logprobs[len(request.output_ids) :]
                for token in request.output_ids[len(request.logprobs) :]:
                    request.logprobs.append([TokenLogprob(token, -1.0, 1)])
        for piece in feed.take():
            pieces[piece.index].append(piece)
    assert feed.take() == []
    return pieces


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("stop", [(), ("ab",), ("aba", "bb"), ("abcab", " a"), ("zzz",)])
def test_pieces_together_are_the_output(seed, stop):
    rng = random.Random(seed)
    params = SamplingParams(
        n=2,
        stop=stop,
        max_tokens=rng.randint(1, 30),
        include_stop_str_in_output=rng.random() < 0.5,
        logprobs=0,
        min_tokens=0,
    )
    group, decode = make_group(params)
    pieces = run(group, GroupFeed(group, decode), rng)
    whole = request_output(group, decode)
    for output in whole.outputs:
        parts = pieces[output.index]
        assert "".join(part.text for part in parts) == output.text
        assert [one for part in parts for one in part.token_ids] == output.token_ids
        assert [one for part in parts for one in part.origins] == output.origins
        assert [one for part in parts for one in part.logprobs] == output.logprobs
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (output.finish_reason, output.stop_reason)
        assert parts[-1].stats is not None
        if output.stop_reason is not None and not params.include_stop_str_in_output:
            assert all(stop_string not in output.text for stop_string in stop)


def test_text_waits_while_it_may_be_a_stop_string():
    group, decode = make_group(SamplingParams(stop=("abc",), max_tokens=20))
    feed, post = GroupFeed(group, decode), Postprocessor(K, EngineStats())
    seen = []
    for token in (25, 8, 9, 8, 9, 10):  # r a b a b c
        post.apply(group.requests, [[token, 0, 0, 0, 1, 0]])
        seen += [(piece.text, piece.token_ids) for piece in feed.take()]
    assert seen == [("r", [25]), ("ab", [8, 9]), ("", [])]
    assert group.requests[0].output_ids == [25, 8, 9]


def test_whole_gives_one_piece_a_completion_once_it_has_ended():
    group, decode = make_group(SamplingParams(n=3, max_tokens=10), text=False)
    pieces = run(group, GroupFeed(group, decode, whole=True), random.Random(1))
    assert [len(parts) for parts in pieces.values()] == [1, 1, 1]
    for output in request_output(group, decode).outputs:
        assert pieces[output.index][0].text == output.text != ""


def test_without_a_tokenizer_tokens_come_alone():
    group, decode = make_group(SamplingParams(max_tokens=10), tokenizer=False)
    pieces = run(group, GroupFeed(group, decode), random.Random(1))[0]
    assert len(pieces) > 1
    assert [one for part in pieces for one in part.token_ids] == group.requests[0].output_ids


def owners(output, decode):
    """Depth of the token that completed each character, by decoding every prefix anew."""
    depths = []
    for end, depth in enumerate(output.origins, start=1):
        complete = decode(output.token_ids[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
        depths += [depth] * (len(complete) - len(depths))
    return depths


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("stop", [(), ("ab",), ("abcab", " a")])
def test_traces_say_which_draft_each_character_came_from(seed, stop):
    rng = random.Random(seed)
    group, decode = make_group(SamplingParams(n=2, stop=stop, max_tokens=rng.randint(1, 30)))
    ticks = iter(range(1000))
    pieces = run(group, GroupFeed(group, decode, clock=lambda: float(next(ticks))), rng)
    for output, request in zip(request_output(group, decode).outputs, group.requests, strict=True):
        parts, depths = pieces[output.index], []
        for piece in parts:
            assert "".join(text for text, _ in piece.trace.parts) == piece.text
            depths += [depth for text, depth in piece.trace.parts for _ in text]
        want = owners(output, decode)
        assert depths[: len(want)] == want[: len(depths)]
        assert len(depths) == len(output.text)
        seconds = [piece.trace.seconds for piece in parts]
        assert seconds == sorted(seconds)
        assert parts[-1].trace.num_steps == request.stats.steps > 0
        assert parts[-1].trace.num_draft_steps == request.stats.draft_steps > 0
        assert parts[-1].trace.num_drafted == request.stats.drafted
        assert parts[-1].trace.num_accepted == request.stats.accepted


def test_a_character_of_several_tokens_goes_with_the_last():
    from eyas.engine.feed import Seams

    seams = Seams(lambda ids: PieceTokenizer().decode(ids))
    seams.add([2, 3, 4, 5, 8, 9], [1, 2, 3, 0, 1, 2])
    assert seams.cut("\N{GRINNING FACE}a") == [("\N{GRINNING FACE}", 0), ("a", 1)]
    assert seams.cut("") == []
    assert seams.cut("bq") == [("b", 2), ("q", 2)]


def test_without_a_clock_there_is_no_trace():
    group, decode = make_group(SamplingParams(max_tokens=5))
    assert all(piece.trace is None for piece in run(group, GroupFeed(group, decode), random.Random(0))[0])

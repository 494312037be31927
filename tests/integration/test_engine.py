"""The engine as a caller sees it: texts, stops, logprobs, streams, aborts, failures."""

import itertools
import math

import numpy as np
import pytest
import torch

from eyas.core.errors import ConfigError, RequestError
from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from fakes import OracleDrafter, PieceTokenizer, full_forward, naive_greedy, random_head
from tiny import tiny_target

PROMPT = [9, 20, 31]


@pytest.fixture(scope="module")
def target():
    target = tiny_target(seed=3)
    target.tokenizer = PieceTokenizer()
    return target


@pytest.fixture(scope="module")
def answer(target) -> list[int]:
    return naive_greedy(target, PROMPT, 40)


def greedy(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **options})


def perfect(answer: list[int], num_drafts: int = 7) -> OracleDrafter:
    return OracleDrafter(num_drafts, [PROMPT + answer], skill=1.0, vocab_size=64)


def make(target, drafter=None, **options) -> LLM:
    return LLM(target, drafter, **{"max_model_len": 96, "page_size": 8, "max_num_seqs": 4, **options})


def check_empty(llm: LLM) -> None:
    scheduler = llm._runner.scheduler
    scheduler.check_integrity()
    assert scheduler.idle
    assert scheduler.blocks.num_free == scheduler.blocks.num_pages - 1
    assert llm._live == {}


def both(target, answer, params: SamplingParams):
    """The completion of plain decoding and of runs of eight; they must be the same in everything."""
    plain = make(target).generate([PROMPT], params)[0]
    drafted = make(target, perfect(answer)).generate([PROMPT], params)[0]
    one, two = plain.outputs[0], drafted.outputs[0]
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == (
        two.text,
        two.token_ids,
        two.finish_reason,
        two.stop_reason,
    )
    assert len(two.token_ids) == len(two.origins)
    assert_same_logprobs(one.logprobs, two.logprobs)
    # A stop string's own tokens were decoded by both, though they are cut.
    # Where a run is cut, its last token is a draft too, so that its step has no token of the target's own.
    assert plain.stats.steps <= drafted.stats.accepted + drafted.stats.steps <= plain.stats.steps + 1
    assert drafted.stats.steps < plain.stats.steps or plain.stats.steps < 3
    return two


def assert_same_logprobs(one, two):
    assert (one is None) == (two is None)
    for mine, theirs in zip(one or [], two or [], strict=True):
        assert [(e.token_id, e.rank) for e in mine] == [(e.token_id, e.rank) for e in theirs]
        assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in theirs], abs=1e-4)


def test_text_is_the_decoded_tokens(target, answer):
    completion = both(target, answer, greedy())

    assert completion.text == target.tokenizer.decode(answer[:30])
    assert completion.finish_reason == "length"


def test_origins_say_which_tokens_were_drafts(target, answer):
    completion = make(target, perfect(answer, 3)).generate([PROMPT], greedy(max_tokens=11))[0].outputs[0]

    assert completion.origins == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("place", range(10))
def test_stop_tokens_inside_a_run(target, answer, place):
    completion = both(target, answer, greedy(stop_token_ids=(answer[place],)))
    end = answer.index(answer[place])

    assert completion.token_ids == answer[: end + 1]
    assert completion.text == target.tokenizer.decode(answer[:end])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", answer[place])


def test_end_of_text_stops_unless_ignored(target):
    """The eos id is made likely by a bias, from the third token on."""
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=3, logit_bias={0: 100.0})
    completion = make(target).generate([PROMPT], params)[0].outputs[0]

    assert completion.token_ids[-1] == 0
    assert len(completion.token_ids) == 4
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    ignoring = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logit_bias={0: 100.0})
    assert make(target).generate([PROMPT], ignoring)[0].outputs[0].token_ids == [0] * 9


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("place", range(8))
def test_stop_strings_inside_a_run(target, answer, place, include):
    whole = target.tokenizer.decode(answer[:30])
    stop = whole[place + 2 : place + 5]
    params = greedy(stop=(stop,), include_stop_str_in_output=include, logprobs=1)
    completion = both(target, answer, params)
    begin = whole.find(stop)

    assert completion.text == whole[: begin + len(stop) * include]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert target.tokenizer.decode(completion.token_ids).startswith(completion.text)
    if "\N{REPLACEMENT CHARACTER}" not in completion.text:  # else a cut character looks like a broken one
        assert not target.tokenizer.decode(completion.token_ids[:-1]).startswith(completion.text)
    assert len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("max_tokens", range(1, 19))
def test_max_tokens_inside_a_run(target, answer, max_tokens):
    completion = both(target, answer, greedy(max_tokens=max_tokens))

    assert completion.token_ids == answer[:max_tokens]
    assert completion.finish_reason == "length"


def test_logprobs_are_those_of_a_whole_forward(target, answer):
    completion = (
        make(target, perfect(answer, 3)).generate([PROMPT], greedy(logprobs=3, max_tokens=10))[0].outputs[0]
    )
    logits, _ = full_forward(target, PROMPT + answer[:10])
    wanted = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]

    assert len(completion.logprobs) == 10
    for row, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        top = wanted[row].topk(3)
        assert [entry.token_id for entry in entries] == [token, *top.indices.tolist()]
        assert [entry.rank for entry in entries] == [1, 1, 2, 3]
        assert entries[0].logprob == pytest.approx(float(wanted[row, token]), abs=1e-4)
        assert [entry.logprob for entry in entries[1:]] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_logprobs_are_taken_before_processing(target, answer):
    """A bias decides the token; its log-probability is the target's own, and its rank too."""
    unlikely = 63 if answer[0] != 63 else 62
    params = greedy(logprobs=0, max_tokens=4, logit_bias={unlikely: 100.0})
    completion = make(target).generate([PROMPT], params)[0].outputs[0]
    logits, _ = full_forward(target, PROMPT + [unlikely] * 4)
    wanted = logits.log_softmax(-1)

    assert completion.token_ids == [unlikely] * 4
    for row, (entry,) in enumerate(completion.logprobs):
        scores = wanted[len(PROMPT) - 1 + row]
        assert entry.logprob == pytest.approx(float(scores[unlikely]), abs=1e-4)
        assert entry.rank == int((scores > scores[unlikely]).sum()) + 1


def test_requests_with_and_without_logprobs_share_a_batch(target, answer):
    outputs = make(target, perfect(answer)).generate(
        [PROMPT] * 3, [greedy(), greedy(logprobs=2), greedy(logprobs=0)]
    )
    completions = [output.outputs[0] for output in outputs]

    assert [c.token_ids for c in completions] == [answer[:30]] * 3
    assert completions[0].logprobs is None
    assert {len(entries) for entries in completions[1].logprobs} == {3}
    assert {len(entries) for entries in completions[2].logprobs} == {1}


def test_streams_are_cumulative_and_end_as_generate_does(target, answer):
    whole = make(target).generate([PROMPT], greedy())[0].outputs[0]
    llm = make(target, perfect(answer, 3))
    seen = [output.outputs[0] for output in llm.stream(PROMPT, greedy())]

    assert [len(c.token_ids) for c in seen] == [1, 5, 9, 13, 17, 21, 25, 29, 30]
    assert all(late.text.startswith(early.text) for early, late in itertools.pairwise(seen))
    assert (seen[-1].text, seen[-1].token_ids, seen[-1].finish_reason) == (
        whole.text,
        whole.token_ids,
        "length",
    )
    assert all(c.finish_reason is None for c in seen[:-1])
    check_empty(llm)


def test_closing_a_stream_frees_its_pages(target):
    llm = make(target)
    stream = llm.stream(PROMPT, greedy())
    next(stream)
    assert not llm._runner.scheduler.idle
    stream.close()

    check_empty(llm)


def test_a_stream_that_is_never_read_holds_nothing(target):
    llm = make(target)
    llm.stream(PROMPT, greedy()).close()

    check_empty(llm)


def test_two_streams_and_a_batch_at_once(target, answer):
    llm = make(target, random_head(target, "eagle3", 3))
    one, two = llm.stream(PROMPT, greedy()), llm.stream([5], greedy())
    next(one)
    next(two)
    batch = llm.generate([PROMPT, [7, 8]], greedy())

    assert batch[0].outputs[0].token_ids == answer[:30]
    assert list(one)[-1].outputs[0].token_ids == answer[:30]
    assert list(two)[-1].outputs[0].token_ids == naive_greedy(target, [5], 30)
    check_empty(llm)


def test_abort_in_the_middle(target, answer):
    llm = make(target, perfect(answer))
    stream, other = llm.stream(PROMPT, greedy()), llm.stream(PROMPT, greedy())
    first = next(stream)
    next(other)

    assert llm.abort(first.request_id)
    assert not llm.abort(first.request_id)
    assert not llm.abort("no such request")
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    assert list(other)[-1].outputs[0].token_ids == answer[:30]
    check_empty(llm)


def test_an_interrupted_batch_leaves_nothing_behind(target, monkeypatch):
    llm = make(target)
    step = llm._runner.step
    calls = iter(range(5))

    def interrupted():
        if next(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 6, greedy())

    check_empty(llm)


def test_several_completions_of_a_prompt(target):
    llm = make(target, max_num_seqs=2)
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params)
    tokens = [completion.token_ids for completion in output.outputs]

    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(t) for t in tokens}) == 3
    for index in range(3):
        single = SamplingParams(temperature=1.0, seed=5 + index, max_tokens=12, ignore_eos=True)
        assert llm.generate([PROMPT], single)[0].outputs[0].token_ids == tokens[index]
    assert output.stats.steps == 36
    check_empty(llm)


def test_requests_without_a_seed_differ_and_an_engine_repeats_itself(target):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first = [o.outputs[0].token_ids for o in make(target).generate([PROMPT] * 2, params)]
    again = [o.outputs[0].token_ids for o in make(target).generate([PROMPT] * 2, params)]
    other = [o.outputs[0].token_ids for o in make(target, seed=1).generate([PROMPT] * 2, params)]

    assert first[0] != first[1]
    assert first == again
    assert first != other


def test_bulk_generation_equals_generate(target):
    llm = make(target, random_head(target, "peagle", 3))
    prompts = [[i % 64, (7 * i) % 64, 3] for i in range(20)]
    params = SamplingParams(temperature=0.0, max_tokens=11)
    calls = []
    ids = llm.generate_ids(prompts, params, lambda done, tokens: calls.append((done, tokens)))

    assert ids == [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert calls[-1] == (20, sum(map(len, ids)))
    assert calls == sorted(calls)
    check_empty(llm)


def test_requests_come_out_as_they_end(target):
    llm = make(target, max_num_seqs=2)
    prompts = [[i % 64, (7 * i) % 64, 3] for i in range(6)]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + 5 * (i % 3)) for i in range(6)]
    found = {index: (ids, reason) for index, ids, reason in llm.iterate_ids(prompts, params)}

    assert [found[i][0] for i in range(6)] == llm.generate_ids(prompts, params)
    assert {reason for _, reason in found.values()} <= {"stop", "length"}
    check_empty(llm)


def test_requests_that_ended_in_somebody_elses_step_come_out_too(target):
    llm = make(target)
    iterator = llm.iterate_ids([[5], [6], [7]], [greedy(max_tokens=n) for n in (1, 2, 3)])
    first = next(iterator)
    llm.generate([PROMPT], greedy())

    assert sorted([first[0], *(index for index, _, _ in iterator)]) == [0, 1, 2]
    check_empty(llm)


def test_a_callback_may_abort(target):
    llm = make(target)

    def report(done: int, tokens: int) -> None:
        for request_id in list(llm._live):
            llm.abort(request_id)

    ids = llm.generate_ids([[5], [6]], [greedy(max_tokens=2), greedy(max_tokens=20)], report)
    assert [len(output) for output in ids] == [2, 2]
    check_empty(llm)


def test_chat_goes_through_the_template(target):
    llm = make(target)
    output = llm.chat([{"role": "user", "content": "ab"}], greedy(max_tokens=2))[0]

    assert output.prompt_token_ids == target.tokenizer.encode("abq", add_special_tokens=False)
    two = llm.chat(
        [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]], greedy(max_tokens=2)
    )
    assert two[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(two) == 2


def test_text_prompts_are_encoded(target):
    output = make(target).generate("ab", greedy(max_tokens=2))[0]

    assert output.prompt == "ab"
    assert output.prompt_token_ids == [1, 8, 9]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(), "the prompt is empty"),
        ([1] * 96, greedy(), "96 tokens; with max_model_len=96 at most 95"),
        ([1, 64], greedy(), "from 0 to 63; this prompt has 1 to 64"),
        ([-1, 3], greedy(), "from 0 to 63"),
        ([1, 2.5], greedy(), r"list of token ids \(integers\), got"),
        ([1, "a"], greedy(), r"list of token ids \(integers\), got"),
        ([[1]], greedy(), r"list of token ids \(integers\), got"),
        (None, greedy(), "a prompt is a text or a list of token ids"),
        ("a\ud83d", greedy(), "half of a surrogate pair"),
        ([1], greedy(logprobs=65), "logprobs=65, but the vocabulary has 64"),
        ([1], {"temperature": 0}, "params must be SamplingParams, got (dict|str)"),
        ([1], greedy(logit_bias={64: 1.0}), "logit_bias: token id 64"),
        ([1], greedy(stop_token_ids=(-3,)), "stop_token_ids: -3"),
    ],
)
def test_bad_requests_raise_before_anything_runs(target, prompt, params, message):
    llm = make(target)
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], params)
    with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
        llm.generate([[5], prompt], [greedy(), params])
    with pytest.raises(RequestError, match=message):
        llm.stream(prompt, params)

    assert llm.stats.steps == 0
    check_empty(llm)


def test_integers_of_any_kind_are_token_ids(target):
    llm = make(target)
    wanted = llm.generate([PROMPT], greedy())[0].outputs[0].token_ids
    for prompts in ([np.array(PROMPT)], [torch.tensor(PROMPT)], np.array(PROMPT), PROMPT, tuple(PROMPT)):
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy())] == [wanted]
    assert llm.generate([], greedy()) == []
    with pytest.raises(RequestError, match="prompts must be a text"):
        llm.generate(5, greedy())


@pytest.mark.parametrize("messages", ["hello", [5], [{"content": "x"}], [[]], {"role": "user"}])
def test_messages_that_are_none(target, messages):
    with pytest.raises(RequestError, match="messages must be a list"):
        make(target).chat(messages, greedy())


def test_a_template_that_fails_says_why(target, monkeypatch):
    def fails(*_args, **_options):
        raise KeyError("content")

    monkeypatch.setattr(target.tokenizer, "apply_chat_template", fails)
    with pytest.raises(RequestError, match="chat template does not take these messages: 'content'"):
        make(target).chat([{"role": "user"}], greedy())


def test_what_needs_a_tokenizer_says_so():
    llm = make(tiny_target())
    with pytest.raises(RequestError, match="no tokenizer: give token ids"):
        llm.generate(["text"], greedy())
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([[1]], greedy(stop=("a",)))
    assert llm.generate([[1]], greedy(max_tokens=3))[0].outputs[0].text == ""


@pytest.mark.parametrize("drafted", [False, True])
def test_a_broken_request_ends_alone(drafted):
    """Token 5 has an embedding of NaN: its own request fails, the neighbours' tokens stay what they are."""
    healthy = tiny_target(seed=3)
    expected = naive_greedy(healthy, PROMPT, 12)
    broken = tiny_target(seed=3)
    with torch.no_grad():
        broken.decoder.lm_head.weight.copy_(healthy.decoder.lm_head.weight)
        broken.decoder.embed_tokens.weight[5] = math.nan
    assert 5 not in expected
    llm = make(broken, perfect(expected, 3) if drafted else None)
    outputs = llm.generate([PROMPT, [9, 5, 7], PROMPT], greedy(max_tokens=12))

    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].token_ids == []
    assert "no usable logits" in outputs[1].error
    assert outputs[0].error is None
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == expected
    check_empty(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1000}, "max_model_len=1000 must be from 2 to 256"),
        ({"num_pages": 3}, "num_pages=3 of 8 tokens cannot hold one request of max_model_len=96"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 10**7}, "max_num_seqs=10000000: at most 16384"),
        ({"prefill_budget": 0}, "prefill_budget=0 must be"),
        ({"gpu_memory_fraction": 5}, "gpu_memory_fraction=5 must be"),
        ({"drafter": 5}, "drafter=5: give a head folder"),
        ({"device": "foo"}, "device 'foo' is unknown"),
        ({"page_size": 0}, "page_size=0"),
        ({"num_draft_tokens": 3}, "num_draft_tokens=3 needs a drafter"),
        ({"dtype": torch.bfloat16}, "loaded as torch.float32"),
    ],
)
def test_bad_engines_are_refused(target, options, message):
    with pytest.raises(ConfigError, match=message):
        make(target, **options)


def test_statistics(target, answer):
    llm = make(target, perfect(answer, 3))
    (output,) = llm.generate([PROMPT], greedy(max_tokens=10))
    stats = llm.stats

    # Runs of 1, without drafts, 4, 4 and, cut to its first draft, 1.
    assert (stats.steps, stats.row_steps, stats.committed, stats.accepted) == (4, 4, 10, 7)
    assert stats.drafted == output.stats.drafted == 9
    assert stats.drafted_row_steps == output.stats.draft_steps == 3
    assert stats.accepted_by_depth == output.stats.accepted_by_depth == [3, 2, 2]
    assert stats.accepted == sum(origin > 0 for origin in output.outputs[0].origins)
    assert stats.acceptance_length == output.stats.acceptance_length == 1 + 7 / 3
    assert stats.acceptance_by_depth == [1, 2 / 3, 2 / 3]
    assert stats.tokens_per_forward == 2.5
    assert stats.prefill_tokens == 2
    assert stats.wall_seconds > stats.verify_seconds > 0
    assert stats.draft_seconds > 0
    stats.reset()
    assert stats.as_dict()["steps"] == 0
    llm.generate([PROMPT], greedy(max_tokens=10))
    assert stats.accepted_by_depth == [3, 2, 2]


def test_a_reused_row_starts_without_drafts(target, answer):
    llm = make(target, perfect(answer, 3), max_num_seqs=1)
    llm.generate([PROMPT], greedy(max_tokens=9))
    first = llm.stats.as_dict()
    llm.generate([PROMPT], greedy(max_tokens=9))

    for name in ("steps", "drafted", "accepted", "committed"):
        assert llm.stats.as_dict()[name] == 2 * first[name]


def test_a_progress_bar_may_be_shown(target, capsys):
    make(target).generate([PROMPT] * 2, greedy(max_tokens=3), progress=True)

    assert "generating" in capsys.readouterr().err

"""The official client against a real server; every greedy answer equals a plain solo run of the target."""

import openai
import pytest

from eyas.core.sampling import SamplingParams
from served import NAME, tiny_llm

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def plain():
    return tiny_llm(drafter=None)


def greedy(plain, prompt, **params):
    return plain.generate([prompt], SamplingParams(temperature=0.0, **params))[0].outputs[0]


def test_chat(client, plain):
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, max_tokens=20)
    want = plain.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=20))[0]
    assert answer.choices[0].message.content == want.outputs[0].text
    assert answer.choices[0].finish_reason == want.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)
    assert answer.usage.completion_tokens == len(want.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    speculation = answer.usage.speculation
    assert speculation["steps"] + speculation["accepted_tokens"] == answer.usage.completion_tokens
    assert sum(speculation["accepted_by_depth"]) == speculation["accepted_tokens"]


def test_chat_stream(client, plain):
    chunks = list(
        client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    want = plain.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=20))[0].outputs[0]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == want.text
    assert sum(bool(text) for text in texts) > 3
    assert chunks[-2].choices[0].finish_reason == want.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(want.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("prompt", ["once upon a time", [1, 20, 30, 40]])
def test_completion(client, plain, prompt):
    answer = client.completions.create(model=NAME, prompt=prompt, temperature=0)
    want = greedy(plain, prompt, max_tokens=16)
    assert answer.choices[0].text == want.text
    assert answer.usage.completion_tokens == len(want.token_ids)


def test_completion_stream(client, plain):
    stream = client.completions.create(
        model=NAME, prompt="once", temperature=0, max_tokens=30, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    want = greedy(plain, "once", max_tokens=30, ignore_eos=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == want.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_several_prompts_and_choices_keep_their_order(client, plain):
    prompts = ["abc", "xyz", "hello"]
    answer = client.completions.create(model=NAME, prompt=prompts, temperature=0, max_tokens=12, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, choice in enumerate(answer.choices):
        assert choice.text == greedy(plain, prompts[index // 2], max_tokens=12).text


def test_streamed_choices_do_not_cross(client, plain):
    stream = client.completions.create(
        model=NAME, prompt=["abc", "xyz"], temperature=0, max_tokens=12, stream=True
    )
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [greedy(plain, prompt, max_tokens=12).text for prompt in ("abc", "xyz")]


def test_a_seed_gives_the_same_answer_and_choices_differ(client, plain):
    def ask():
        return client.chat.completions.create(
            model=NAME, messages=MESSAGES, seed=7, n=3, temperature=1.5, max_tokens=16, top_p=0.9
        )

    first, second = ask(), ask()
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    params = SamplingParams(seed=7, n=3, temperature=1.5, max_tokens=16, top_p=0.9)
    assert texts == [output.text for output in plain.chat(MESSAGES, params)[0].outputs]


def test_chat_logprobs(client, plain):
    asked = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    want = plain.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=9, logprobs=2))[0].outputs[0]
    content = answer.choices[0].logprobs.content
    assert len(content) == len(want.token_ids)
    for entry, (chosen, *top) in zip(content, want.logprobs, strict=True):
        assert entry.logprob == pytest.approx(chosen.logprob, abs=1e-4)
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(
            [other.logprob for other in top], abs=1e-4
        )
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    streamed = []
    for chunk in client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_completion_logprobs(client):
    asked = {"model": NAME, "prompt": "hello", "temperature": 0, "max_tokens": 9, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == len(whole.text_offset)
    assert all(len(top) <= 2 for top in whole.top_logprobs)
    assert all(
        logprob == pytest.approx(max(top.values()), abs=1e-4)
        for logprob, top in zip(whole.token_logprobs, whole.top_logprobs, strict=True)
    )
    chunks = list(client.completions.create(**asked, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == whole.tokens


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).max_model_len == 256


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)

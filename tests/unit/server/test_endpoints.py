"""What a client may get wrong, limits, and the small endpoints; all over a real socket."""

import json

import pytest

from served import CHAT, NAME, TEXT, Served, tiny_llm

HELLO = [{"role": "user", "content": "hello"}]


def error_of(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2.0),
        ("n", 0),
        ("n", 1000),
        ("n", True),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("presence_penalty", 1e9),
        ("repetition_penalty", 0),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", ["x"] * 99),
        ("stop", {}),
        ("stop", 0),
        ("stop_token_ids", [64]),
        ("logit_bias", {"64": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"3": 101}),
        ("seed", 2**80),
        ("seed", 1.5),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_schema"}),
        ("stream", "yes"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_bad_value_names_its_field(served, path, field, value):
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    error = error_of(served.post(path, **body, **{field: value}))
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [*HELLO, {"role": "user", "content": [{"type": "x"}]}]}, "messages[1].content"),
        (CHAT, {"messages": [{"role": "a", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [64]}, "prompt"),
        (TEXT, {"prompt": [[1, 2], []]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "x", "echo": True}, "echo"),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (TEXT, {"prompt": ["x"] * 65}, "prompt"),
        (TEXT, {"prompt": ["x"] * 33, "n": 2}, "n"),
        ("/tokenize", {}, "prompt"),
    ],
)  # fmt: skip
def test_a_bad_body_names_the_place(served, path, body, param):
    assert error_of(served.post(path, **body))["param"] == param


def test_unknown_fields_are_refused_with_the_nearest_name(served):
    error = error_of(served.post(CHAT, messages=HELLO, temprature=0.5))
    assert error["param"] == "temprature"
    assert "did you mean 'temperature'" in error["message"]


def test_fields_that_cannot_change_the_answer_are_ignored(served):
    plain = {"messages": HELLO, "temperature": 0, "max_tokens": 5}
    ignored = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "tools": [],
        "top_k": None,
        "logit_bias": None,
    }
    first, second = served.post(CHAT, **plain), served.post(CHAT, **plain, **ignored)
    assert second.status_code == 200, second.text
    assert first.json()["choices"] == second.json()["choices"]


def test_too_long_a_prompt_is_refused(served):
    error = error_of(served.post(TEXT, prompt="a" * 300))
    assert error["param"] == "prompt"
    assert error["code"] == "context_length_exceeded"
    assert (
        error_of(served.post(CHAT, messages=[{"role": "user", "content": "a" * 300}]))["param"] == "messages"
    )


def test_an_answer_ends_where_the_context_does(served):
    body = served.post(TEXT, prompt="a" * 240, max_tokens=1000, ignore_eos=True, temperature=0).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 256


def test_what_is_no_json_is_refused(served):
    headers = {"content-type": "application/json"}
    for content in (b"{", b"[" * 100_000, b'{"prompt": "x", "temperature": NaN}', b"\xff"):
        error_of(served.http.post(TEXT, content=content, headers=headers))
    assert error_of(served.http.post(TEXT, content=b"[]", headers=headers))["message"]
    error_of(served.http.post(TEXT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    error_of(served.http.get(TEXT), 405)
    error_of(served.http.get("/v1/nothing"), 404)


def test_too_long_a_body_is_refused_while_it_is_read():
    with Served(max_body_bytes=1000) as served:
        assert error_of(served.post(TEXT, prompt="a" * 1000), 413)["code"] == "body_too_large"

        def parts():
            for _ in range(100):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        error_of(served.http.post(TEXT, content=parts(), headers=headers), 413)
        assert served.post(TEXT, prompt="a").status_code == 200


def test_a_body_of_three_megabytes_is_read_by_default(served):
    assert error_of(served.post(TEXT, prompt="a" * 3_000_000))["code"] == "context_length_exceeded"


def test_the_key_guards_the_api():
    with Served(api_key="s3cret-\N{LATIN SMALL LETTER E WITH ACUTE}") as served:
        key = "s3cret-\N{LATIN SMALL LETTER E WITH ACUTE}"
        for given in (None, b"Bearer wrong", b"Basic x", b"Bearer", b"s3cret"):
            headers = {} if given is None else {"authorization": given}
            error = error_of(served.http.post(TEXT, json={"prompt": "a"}, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
            assert served.http.get("/v1/models", headers=headers).status_code == 401
        assert served.http.get("/health").status_code == 200
        headers = {"authorization": f"Bearer {key}".encode()}
        assert served.http.post(TEXT, json={"prompt": "a"}, headers=headers).status_code == 200
        assert key not in repr(served.service.settings)


def test_parameters_reach_the_engine(served):
    def ids(**body):
        body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "return_token_ids": True, **body}
        choice = served.post(TEXT, **body).json()["choices"][0]
        assert len(choice["origins"]) == len(choice["token_ids"])
        return choice["token_ids"]

    free = ids(ignore_eos=True)
    assert len(free) == 12
    assert ids(logit_bias={str(free[0]): -100})[0] != free[0]
    assert set(ids(logit_bias={"33": 100})) == {33}
    assert len(set(ids(frequency_penalty=100, ignore_eos=True))) == 12
    assert len(set(ids(presence_penalty=100, ignore_eos=True))) == 12
    assert ids(repetition_penalty=100, ignore_eos=True) != free
    assert ids(ignore_eos=True, temperature=5, top_k=1) == free
    assert ids(ignore_eos=True, temperature=5, min_p=1) == free
    assert ids(ignore_eos=True, temperature=5, top_p=1e-6) == free
    assert ids(stop_token_ids=[free[3]], ignore_eos=True) == free[: free.index(free[3]) + 1]
    assert ids(logit_bias={"0": 100}) == [0]
    assert len(ids(logit_bias={"0": 100}, min_tokens=4)) == 5


def test_tokenize(served):
    body = served.post("/tokenize", prompt="abc").json()
    assert body == {"count": 4, "max_model_len": 256, "tokens": [1, 8, 9, 10]}
    assert served.post("/tokenize", prompt="abc", add_special_tokens=False).json()["tokens"] == [8, 9, 10]
    body = served.post(
        "/tokenize", messages=[{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    ).json()
    assert body["tokens"] == [8, 9, 10, 24]


def test_a_target_without_tokenizer_serves_token_ids():
    with Served(tiny_llm(tokenizer=False)) as served:
        body = served.post(TEXT, prompt=[1, 2, 3], return_token_ids=True, logprobs=1).json()
        assert len(body["choices"][0]["token_ids"]) >= 1
        assert body["choices"][0]["text"] == ""
        assert body["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        events = served.events(TEXT, prompt=[1, 2, 3], return_token_ids=True, temperature=0)
        whole = served.post(TEXT, prompt=[1, 2, 3], return_token_ids=True, temperature=0).json()["choices"][0]
        assert [one for event in events for one in event["choices"][0]["token_ids"]] == whole["token_ids"]
        assert error_of(served.post(TEXT, prompt="abc"))["param"] == "prompt"
        assert error_of(served.post(CHAT, messages=HELLO))["param"] == "messages"
        assert error_of(served.post(TEXT, prompt=[1], stop="x"))["param"] == "stop"


def test_metrics(served):
    served.post(TEXT, prompt="hello", temperature=0, max_tokens=30, ignore_eos=True)
    text = served.http.get("/metrics").text
    stats = served.llm.stats
    assert served.metric("vllm:spec_decode_num_drafts_total") == stats.drafted_row_steps > 0
    assert (
        served.metric("vllm:spec_decode_num_draft_tokens_total")
        == stats.drafted
        == 3 * stats.drafted_row_steps
    )
    assert served.metric("vllm:spec_decode_num_accepted_tokens_total") == stats.accepted
    for position in range(3):
        labels = f'{{model_name="{NAME}",position="{position}"}}'
        name = f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels}"
        assert served.metric(name) == stats.accepted_by_depth[position]
    assert served.metric("eyas_generation_tokens_total") == stats.committed
    assert served.metric("eyas_kv_pages_free") == served.metric("eyas_kv_pages") > 0
    assert served.metric('eyas_completions_finished_total{reason="length"}') >= 1
    assert 'eyas_http_requests_total{path="/v1/completions",status="200"}' in text
    assert "spec_decode_num_drafts_created" not in text


def test_there_is_one_acceptance_length(served):
    """Of a request: in `usage`, and from two readings of /metrics or of the engine, as a sweep takes them."""
    from eyas.bench.counters import Counters

    def read():
        stats = Counters.of_stats(served.llm.stats.as_dict())
        return Counters.of_metrics(served.http.get("/metrics").text), stats

    before = read()
    usage = served.post(TEXT, prompt="hello", temperature=0, max_tokens=30, ignore_eos=True).json()["usage"]
    found = [after - earlier for after, earlier in zip(read(), before, strict=True)]
    speculation = usage["speculation"]
    length = 1 + speculation["accepted_tokens"] / speculation["draft_steps"]
    assert length > 1
    assert speculation["draft_steps"] == speculation["steps"] - 1 == found[0].drafts
    assert speculation["acceptance_length"] == pytest.approx(length, abs=1e-4)
    for counters in found:
        assert counters.summary()["acceptance_length"] == length
        assert 1 + sum(counters.summary()["acceptance_by_position"]) == pytest.approx(length)
    stats = served.llm.stats
    assert served.metric("eyas_acceptance_length") == stats.acceptance_length
    assert stats.acceptance_length == 1 + stats.accepted / stats.drafted_row_steps
    assert served.metric("eyas_tokens_per_forward") == stats.tokens_per_forward < stats.acceptance_length


def test_health(served):
    assert served.http.get("/health").json() == {"status": "ok"}


def test_streams_are_plain_server_sent_events(served):
    events = served.events(CHAT, messages=HELLO, model=NAME, temperature=0, max_tokens=4)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert all("usage" not in event for event in events)
    assert json.dumps(events)

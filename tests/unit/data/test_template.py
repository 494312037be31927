import pytest
from toy_tokenizer import END, THINKING, toy_tokenizer

from eyas.core.errors import DataError
from eyas.data.template import ChatTemplate, check_spans

TWO_TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello there "},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(toy_tokenizer(), (END,))


def supervised_texts(template, encoded):
    return [template.tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans]


def test_ids_are_those_of_the_whole_rendering(template):
    encoded = template.encode(TWO_TURNS)
    whole = template.tokenize(template.render(TWO_TURNS))
    # Only what follows the last end of turn (a line break) may be left.
    assert whole[: len(encoded.ids)] == encoded.ids


def test_answers_and_their_end_of_turn_are_supervised_and_nothing_else(template):
    encoded = template.encode(TWO_TURNS)
    assert supervised_texts(template, encoded) == [" Hello there <|im_end|>", "So long<|im_end|>"]
    assert sum(encoded.mask) == sum(b - a for a, b in encoded.spans)
    first = encoded.spans[0][0]
    # The token before the answer is the opening's line break, the one after its end is the template's.
    assert template.tokenizer.decode(encoded.ids[first - 2 : first]) == "t\n"
    assert encoded.ids[encoded.spans[0][1] - 1] == END
    assert encoded.mask[first - 1 : first + 1] == [0, 1]
    assert encoded.mask[encoded.spans[0][1] - 1 : encoded.spans[0][1] + 1] == [1, 0]


def test_the_prompt_of_the_answer_is_its_context(template):
    encoded = template.encode(TWO_TURNS[:3])
    begin, _ = encoded.spans[0]
    assert encoded.ids[:begin] == template.prompt_ids(TWO_TURNS[:2])


def test_boilerplate_before_an_answer_is_not_supervised():
    template = ChatTemplate(toy_tokenizer(THINKING), (END,))
    encoded = template.encode(TWO_TURNS[1:3])
    assert supervised_texts(template, encoded) == ["Hello there<|im_end|>"]
    with pytest.raises(DataError, match="earlier turns"):
        template.encode(TWO_TURNS)
    last = template.encode(TWO_TURNS, last_turn_only=True)
    assert supervised_texts(template, last) == ["So long<|im_end|>"]


def test_follow_up_joins_exact_ids(template):
    """Prompt, the answer's ids, follow-up, next answer: the same ids as rendering it all at once."""
    prompt = template.prompt_ids(TWO_TURNS[:2])
    answer = [*template.tokenize(" Hello there "), END]
    for ids, ended in ((answer, True), (answer[:-1], False)):
        follow = template.follow_up_ids(TWO_TURNS[:2], " Hello there ", TWO_TURNS[3], ended=ended)
        assert prompt + ids + follow == template.prompt_ids(TWO_TURNS[:4])


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "Hi"}], TWO_TURNS[:1]])
def test_nothing_to_supervise_is_an_error(template, messages):
    with pytest.raises(DataError, match="the name: no token is supervised"):
        template.encode(messages, name="the name")


def test_all_supervised_or_overlapping_spans_are_errors():
    with pytest.raises(DataError, match="every token"):
        check_spans([1, 2], [(0, 2)], "x")
    with pytest.raises(DataError, match="bad spans"):
        check_spans([1, 2, 3], [(1, 2), (1, 3)], "x")


def test_a_tokenizer_without_template_is_an_error():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="chat template"):
        ChatTemplate(tokenizer, (END,))


def test_a_users_turn_is_opened_and_ends_where_the_template_says(template):
    opening = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert template.user_ids(TWO_TURNS[:1]) == template.tokenize(opening)
    assert template.user_ids([]) == template.tokenize("<|im_start|>user\n")
    assert template.user_end_id() == END
    # Opening, a text's ids and the rest of the turn are the prompt that the template renders.
    text = template.tokenize("Hi")
    rest = template.tokenize("<|im_end|>\n<|im_start|>assistant\n")
    assert template.user_ids(TWO_TURNS[:1]) + text + rest == template.prompt_ids(TWO_TURNS[:2])


def test_a_users_next_turn_joins_exact_ids(template):
    prompt = template.prompt_ids(TWO_TURNS[:2])
    answer = [*template.tokenize(" Hello there "), END]
    for ids, ended in ((answer, True), (answer[:-1], False)):
        between = template.user_follow_up_ids(TWO_TURNS[:2], " Hello there ", ended=ended)
        assert prompt + ids + between == template.user_ids(TWO_TURNS[:3])


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("<|im_start|>{{ m['content'] | trim }} \n<unused>", 3),  # white space before a special token
        ("[INST] {{ m['content'] }} [/INST]", None),
        ("{{ m['content'] }}", None),
        ("Something else<|im_end|>", None),
    ],
)
def test_where_a_users_turn_ends(text, end):
    tokenizer = toy_tokenizer("{% for m in messages %}" + text + "{% endfor %}")
    template = ChatTemplate(tokenizer, (END,))
    if end is None:
        with pytest.raises(DataError, match="no special token"):
            template.user_end_id()
    else:
        assert template.user_end_id() == end


def test_a_users_text_that_is_shown_twice_has_no_place(template):
    twice = toy_tokenizer(
        "{% for m in messages %}{{ m['content'] }}, {{ m['content'] }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError, match="2 times"):
        ChatTemplate(twice, (END,)).user_ids([])
    assert template.shows_system()
    assert not ChatTemplate(toy_tokenizer("{{ raise_exception('no') }}"), (END,)).shows_system()


def test_special_ids_are_those_that_stand_for_no_text(template):
    assert template.special_ids() == {0, 1, 2, 3}

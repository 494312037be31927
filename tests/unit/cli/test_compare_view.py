from eyas.bench.offline import Answer
from eyas.cli.compare_view import DEPTH_STYLES, coloured

ANSWER = Answer("abcdef", [1] * 6, [0, 1, 2, 0, 1, 9], list("abcdef"))


def test_colours_say_at_which_depth_a_token_was_accepted():
    text = coloured(ANSWER)
    assert text.plain == "abcdef"
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles == {
        "b": DEPTH_STYLES[0],
        "c": DEPTH_STYLES[1],
        "e": DEPTH_STYLES[0],
        "f": DEPTH_STYLES[-1],
    }


def test_without_colours_runs_stand_in_brackets():
    assert coloured(ANSWER, marks=True).plain == "a⟨bc⟩d⟨ef⟩"
    # Depth starts anew with each step, so two runs may touch.
    touching = Answer("abc", [1] * 3, [1, 2, 1], list("abc"))
    assert coloured(touching, marks=True).plain == "⟨ab⟩⟨c⟩"

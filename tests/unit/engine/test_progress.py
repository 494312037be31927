"""Progress goes to stderr: stdout belongs to results."""

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from eyas.engine.progress import capture_bar
from tiny import tiny_target


def test_bars_leave_stdout_alone(capsys):
    llm = LLM(tiny_target(), max_model_len=64, page_size=4)
    llm.generate([[3, 4], [5]], SamplingParams(temperature=0.0, max_tokens=3), progress=True)
    with capture_bar() as report:
        report(2, 7)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "generating" in shown.err
    assert "2/2" in shown.err
    assert "capturing graphs" in shown.err
    assert "2/7" in shown.err

import json
import re
import struct
from html.parser import HTMLParser

import pytest
from sweep_records import cell, step, write

from eyas.bench.report import write_report
from eyas.core.errors import EyasError

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    lines = [
        cell(
            name,
            k,
            1000.0 * boost * c**0.7 * (1 + 0.01 * repeat),
            steps=step(boost, 1.0, draft_ms=0.1),
            drafts=[70, 40, 20][:k] if k else None,
            concurrency=c,
            repeat=repeat,
            dataset=dataset,
        )
        for dataset in ("mt_bench", "own <set>")
        for name, k, boost in (("plain", 0, 1.0), ("eagle3", 3, 2.0), ("peagle", 3, 2.5), ("peagle", 2, 2.2))
        for c in (1, 8)
        for repeat in (0, 1)
    ]
    return write(tmp_path_factory.mktemp("records") / "r.jsonl", *lines)


@pytest.fixture(scope="module")
def written(record, tmp_path_factory):
    """(page, tables) of one report; drawing takes seconds."""
    return write_report([record], tmp_path_factory.mktemp("report"))


class Page(HTMLParser):
    """What a page asks a browser to fetch, and its open tags."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.fetched, self.tags, self.images = [], set(), 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.fetched.append(value)
        self.images += tag == "img"


def test_the_page_needs_nothing_else(written):
    page, document = written
    text = page.read_text()
    found = Page(text)
    assert found.images == 7
    assert found.fetched
    assert all(value.startswith("data:image/png;base64,") for value in found.fetched)
    assert not found.tags & {"script", "link", "iframe", "object", "base"}
    assert not re.search(r"url\(|@import|https?://", re.sub(r"<code>.*?</code>", "", text))
    # Names from records are text, never tags.
    assert "own &lt;set&gt;" in text
    assert "<set>" not in text
    assert "GPU &lt;1&gt;" in text
    assert json.loads((page.parent / "tables.json").read_text()) == json.loads(json.dumps(document))


def test_the_page_says_what_was_found(written):
    text = written[0].read_text()
    assert "peagle: above plain decoding in 4 of 4 places, 2.50x to 2.50x" in text
    assert "peagle K=3 leads eagle3 K=3 1.25x" in text
    assert "P-EAGLE over EAGLE-3: above in 4 of 4 places, 1.25x to 1.25x" in text
    assert "time limit" not in text
    assert grid(text, "P-EAGLE / EAGLE-3")["mt_bench"] == ["1.25", "", "", "1.25", "", "", ""]
    assert grid(text, "P-EAGLE / EAGLE-3")["HumanEval (source)"][:2] == ["1.55", "1.53"]
    assert grid(text, "tokens a verification")["MT-Bench (source)"] == ["eagle3", "", "2.70", "3.27"]
    assert "<td>1.55</td>" in text  # the source's ratio at concurrency 1
    assert "eyas bench sweep &lt;x&gt;" in text


def grid(text, title):
    """First cell -> the others, of the table that begins with a title; the last line of a name counts."""
    table = text.partition(f">{title}</th>")[2].partition("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", "<tr>" + table)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in lines]
    return {line[0]: line[1:] for line in cells if line}


def test_cells_that_the_limit_cut_are_told(tmp_path):
    whole, cut = cell("plain", 0, 10.0), cell("eagle3", 3, 20.0)
    for one, sent in ((whole, 16), (cut, 9)):
        one["cell"]["num_requests"] = 16
        one["result"] |= {"num_requests": sent, "num_completed": sent, "num_errors": 0}
    page, _ = write_report([write(tmp_path / "r.jsonl", whole, cut)], tmp_path / "out")
    assert "The time limit cut 1 of 2 cells off" in page.read_text()


def test_figures_are_images_of_a_useful_size(written):
    figures = sorted(written[0].parent.glob("*.png"))
    names = [path.stem for path in figures]
    assert names == ["acceptance", "latency", "positions", "ratio", "speedup", "step", "throughput"]
    for path in figures:
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", head[16:])
        assert width > 500
        assert height > 400


def test_an_open_loop_alone(tmp_path):
    lines = [cell("plain", 0, 10.0 * rate, concurrency=None, rate=rate) for rate in (0.5, 2.0)]
    page, document = write_report([write(tmp_path / "r.jsonl", *lines)], tmp_path / "out")
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"throughput", "latency"}
    assert "0.5/s" in page.read_text()
    assert document["leaders"] == []


def test_without_matplotlib_it_says_what_to_install(record, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(EyasError, match=r"eyas\[bench\]"):
        write_report([record], tmp_path / "out")

"""User turns that the target writes, and several answers to one prompt, in `regenerate`."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from toy_tokenizer import END, THINKING, toy_tokenizer

from eyas.core.errors import ConfigError, DataError
from eyas.data.build import build_store
from eyas.data.endpoint import EndpointAnswerer
from eyas.data.follow_ups import FollowUpWriter
from eyas.data.regenerate import IdAnswerer, regenerate
from eyas.data.regenerate_dialog import RegenerateConfig
from eyas.data.sources import Prompt
from eyas.data.store import TokenStore
from eyas.data.template import ChatTemplate

TOKENIZER = toy_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER, (END,))
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"


def tokens(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def role_of(ids):
    text = TOKENIZER.decode(ids)
    return "user" if text.endswith(USER) else "assistant" if text.endswith(ASSISTANT) else text


class Both:
    """Answers and asks with its prompt's length; `said` has (reason, text) by role and turn instead."""

    def __init__(self, said=None):
        self.said, self.log = said or {}, []

    def __call__(self, prompts, params):
        for index in reversed(range(len(prompts))):
            ids = list(prompts[index])
            role, turn = role_of(ids), TOKENIZER.decode(ids).count(ASSISTANT)
            self.log.append((role, ids, params[index]))
            text = f"<{len(ids)}>" if role == "assistant" else f"why {len(ids)}?"
            reason, text = self.said.get((role, turn), ("stop", text))
            yield index, tokens(text) + [END] * (reason == "stop"), reason

    def count(self, role):
        return sum(entry[0] == role for entry in self.log)


def run(out, both, prompts, *, template=TEMPLATE, follow_ups=2, about=None, **config):
    settings = RegenerateConfig(**({"shard_size": 5, "window": 7, "follow_ups": follow_ups} | config))
    users = FollowUpWriter(template, both) if follow_ups else None
    about = {"target": "toy"}
    return regenerate(prompts, IdAnswerer(template, both), out, settings, about=about, users=users)


def records(out):
    lines = [line for shard in sorted(out.glob("shard-*.jsonl")) for line in shard.read_text().splitlines()]
    return {record["id"]: record for record in map(json.loads, lines)}


PROMPTS = [
    Prompt(f"p{i}", ("Hi", "And?")[: 1 + i % 2], system="Be kind." if i % 3 else None) for i in range(9)
]


def test_the_next_users_turn_is_sampled_behind_the_exact_ids(tmp_path):
    both = Both()
    manifest = run(tmp_path, both, PROMPTS)
    got = records(tmp_path)
    assert set(got) == {prompt.id for prompt in PROMPTS}
    asked = Counter(tuple(ids) for role, ids, _ in both.log if role == "user")
    assert {params.temperature for role, _, params in both.log if role == "user"} == {0.8}
    for prompt in PROMPTS:
        record = got[prompt.id]
        turns = len(prompt.turns) + 2
        assert record["num_written"] == 2
        assert [m["role"] for m in record["messages"]] == ["system"] * (prompt.system is not None) + [
            "user",
            "assistant",
        ] * turns
        # The whole conversation, rendered at once: the same ids, and only answers are supervised.
        whole = TEMPLATE.encode(record["messages"])
        assert [*record["token_ids"], *tokens("\n")] == whole.ids
        assert [tuple(span) for span in record["spans"]] == whole.spans
        assert len(record["spans"]) == len(record["finish_reasons"]) == turns
        users = [i for i, m in enumerate(record["messages"]) if m["role"] == "user"]
        for place, span in zip(users[-2:], record["spans"][-3:], strict=False):
            # Sampled behind all up to the answer before, and the opening typed by hand.
            behind = record["token_ids"][: span[1]] + tokens("\n" + USER)
            assert record["messages"][place]["content"] == f"why {len(behind)}?"
            asked[tuple(behind)] -= 1
    # Every turn that was asked for is in a conversation, and the other way round.
    assert set(asked.values()) == {0}
    assert manifest["num_answers"] == sum(len(prompt.turns) + 2 for prompt in PROMPTS)


def test_every_turn_has_a_seed_of_its_own(tmp_path):
    both = Both()
    run(tmp_path, both, PROMPTS)
    assert len({params.seed for _, _, params in both.log}) == len(both.log) == 9 * 5 + 4
    assert {params.stop_token_ids for role, _, params in both.log if role == "user"} == {(END,)}


@pytest.mark.parametrize(
    ("said", "roles"),
    [
        ({("user", 1): ("length", "and on and on")}, "ua"),
        ({("user", 1): ("stop", "  ")}, "ua"),
        ({("user", 1): ("error", "")}, "ua"),
        ({("user", 1): ("stop", "no " * 60)}, "ua"),
        ({("user", 2): ("stop", "<|im_start|>")}, "uaua"),
        ({("assistant", 1): ("length", "cut")}, "ua"),
        ({("assistant", 2): ("length", "cut")}, "uaua"),
        ({("assistant", 2): ("error", "")}, "ua"),
        ({("assistant", 3): ("stop", "")}, "uaua"),
        ({}, "uauaua"),
    ],
)
def test_a_conversation_ends_where_no_usable_turn_comes(said, roles, tmp_path):
    manifest = run(tmp_path, Both(said), [Prompt("p", ("Hi",))])
    record = records(tmp_path)["p"]
    assert "".join(m["role"][0] for m in record["messages"]) == roles
    assert record.get("num_written", 0) == manifest.get("num_written", 0) == len(roles) // 2 - 1
    assert len(record["spans"]) == len(record["finish_reasons"]) == len(roles) // 2
    assert record["spans"][-1][1] == len(record["token_ids"])
    assert manifest["num_skipped"] == 0


@pytest.mark.parametrize("limit", range(18, 90, 4))
def test_conversations_stay_within_the_context(limit, tmp_path):
    """No turn is asked for behind more than the limit; what is there stays whole."""
    both = Both()
    manifest = run(tmp_path, both, [Prompt("p", ("Hi",))], max_prompt_tokens=limit)
    assert all(len(ids) <= limit for _, ids, _ in both.log)
    got = records(tmp_path)
    if not got:
        assert manifest["num_skipped"] == 1
        assert len(TEMPLATE.prompt_ids([{"role": "user", "content": "Hi"}])) > limit
        return
    record = got["p"]
    assert record["messages"][-1]["role"] == "assistant"
    assert [*record["token_ids"], *tokens("\n")] == TEMPLATE.encode(record["messages"]).ids
    # It ended because its next turn would not have fitted, or because all are there.
    grown = len(record["token_ids"]) + len(tokens("\n" + USER))
    grown_more = grown + len(tokens(f"why {grown}?<|im_end|>\n{ASSISTANT}"))
    assert len(record["spans"]) == 3 or grown_more > limit


def test_a_template_that_rewrites_earlier_turns_is_refused_at_once(tmp_path):
    both = Both()
    with pytest.raises(DataError, match="rewrites earlier turns"):
        run(tmp_path, both, PROMPTS, template=ChatTemplate(toy_tokenizer(THINKING), (END,)))
    assert not both.log
    with pytest.raises(DataError, match="nobody is there to write them"):
        regenerate(PROMPTS, IdAnswerer(TEMPLATE, both), tmp_path, RegenerateConfig(follow_ups=1), about={})
    for wrong in ({"follow_ups": -1}, {"samples": 0}):
        with pytest.raises(ConfigError, match="at least 1 sample"):
            RegenerateConfig(**wrong)


def test_samples_of_a_prompt_are_spread_over_the_temperatures(tmp_path):
    both = Both()
    mix = {0.0: 1.0, 0.7: 1.0, 1.0: 2.0}
    prompts = [Prompt(f"q{i}", ("Hi",)) for i in range(50)]
    run(tmp_path, both, prompts, follow_ups=0, samples=4, temperatures=mix)
    got = records(tmp_path)
    assert len(got) == 200
    for prompt in prompts:
        own = {name: r for name, r in got.items() if r.get("prompt_id", r["id"]) == prompt.id}
        assert set(own) == {prompt.id, *(f"{prompt.id}/{n}" for n in (1, 2, 3))}
        assert sorted(r["temperature"] for r in own.values()) == [0.0, 0.7, 1.0, 1.0]
    assert len({params.seed for _, _, params in both.log}) == 200


def test_greedy_answers_are_not_asked_for_twice(tmp_path):
    prompts = [Prompt(f"q{i}", ("Hi",)) for i in range(300)]
    run(tmp_path, Both(), prompts, follow_ups=0, samples=3, temperatures={0.0: 0.5, 1.0: 0.5}, shard_size=999)
    by_prompt = {}
    for record in records(tmp_path).values():
        by_prompt.setdefault(record.get("prompt_id", record["id"]), []).append(record["temperature"])
    kinds = Counter(tuple(sorted(temperatures)) for temperatures in by_prompt.values())
    # Points u/3, (u+1)/3, (u+2)/3: two below one half where u < 1/2, one otherwise. 150 each, sigma 8.7.
    assert set(kinds) == {(0.0, 1.0), (0.0, 1.0, 1.0)}
    assert 105 < kinds[(0.0, 1.0)] < 195


def test_samples_resume_and_their_ids_stay_unique(tmp_path):
    def dies(prompts, params):
        for number, item in enumerate(Both()(prompts, params)):
            if number == 5:
                raise KeyboardInterrupt
            yield item

    options = {"follow_ups": 0, "samples": 3, "temperatures": {1.0: 1.0}}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", dies, PROMPTS, **options)
    before = records(tmp_path / "parts")
    assert 0 < len(before) < 27
    both = Both()
    run(tmp_path / "parts", both, PROMPTS, **options)
    assert len(both.log) == 27 + 3 * 4 - sum(len(r["finish_reasons"]) for r in before.values())
    run(tmp_path / "whole", Both(), PROMPTS, **options)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    lines = [s.read_text().count("\n") for s in (tmp_path / "parts").glob("shard-*.jsonl")]
    assert sum(lines) == len(records(tmp_path / "parts")) == 27
    twins = [Prompt("a", ("Hi",)), Prompt("a/1", ("Hi",))]
    with pytest.raises(DataError, match=r"'a' and 'a/1' would both be called 'a/1'"):
        run(tmp_path / "twins", Both(), twins, **options)


def test_samples_of_a_prompt_are_held_out_together(tmp_path):
    run(tmp_path / "out", Both(), PROMPTS, follow_ups=0, samples=4, temperatures={1.0: 1.0})
    build_store(tmp_path / "out", tmp_path / "store", vocab_size=len(TOKENIZER), template=None, meta={})
    store = TokenStore.load(tmp_path / "store")
    assert store.num_documents == 36
    assert sorted(Counter(store.doc_keys.tolist()).values()) == [4] * 9
    run(tmp_path / "one", Both(), PROMPTS, follow_ups=0)
    build_store(tmp_path / "one", tmp_path / "plain", vocab_size=len(TOKENIZER), template=None, meta={})
    assert set(TokenStore.load(tmp_path / "plain").doc_keys.tolist()) == set(store.doc_keys.tolist())


def test_a_store_of_several_folders_has_the_documents_of_each(tmp_path):
    for name, options in (("a", {"follow_ups": 0}), ("b", {"follow_ups": 1})):
        run(tmp_path / name, Both(), PROMPTS, **options)
        build_store(tmp_path / name, tmp_path / f"{name}-store", vocab_size=260, template=None, meta={})
    build_store([tmp_path / "a", tmp_path / "b"], tmp_path / "both", vocab_size=260, template=None, meta={})
    one, two, both = (TokenStore.load(tmp_path / name) for name in ("a-store", "b-store", "both"))
    assert both.num_documents == 18
    assert [both.document(i) for i in range(18)] == [s.document(i) for s in (one, two) for i in range(9)]


def test_folders_from_before_these_options_go_on(tmp_path):
    """run.json names options only where they are used."""
    run(tmp_path, Both(), PROMPTS[:3], follow_ups=0)
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert set(settings) == {"temperatures", "max_new_tokens", "max_prompt_tokens", "seed"}
    with pytest.raises(DataError, match="another run"):
        run(tmp_path, Both(), PROMPTS, follow_ups=1)
    with pytest.raises(DataError, match="another run"):
        run(tmp_path, Both(), PROMPTS, follow_ups=0, samples=2)


class Handler(BaseHTTPRequestHandler):
    """/chat/completions says how many messages there are, /completions how many ids, and refuses one."""

    seen = None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        choice = {"finish_reason": "stop"}
        if self.path == "/v1/completions":
            choice["text"] = f"why {len(body['prompt'])}?"
        else:
            choice["message"] = {"content": f"{len(body['messages'])} messages"}
        self.send_response(400 if "Say 2" in TOKENIZER.decode(body.get("prompt", [])) else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}}).encode())

    def log_message(self, *args):
        pass


def test_an_endpoint_writes_users_turns_behind_the_rendered_text(tmp_path):
    handler = type("This", (Handler,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        answerer = EndpointAnswerer(urls=(f"http://127.0.0.1:{server.server_port}/v1/",), model="m")
        users = FollowUpWriter(TEMPLATE, answerer.continuing(TOKENIZER, END))
        config = RegenerateConfig(follow_ups=2, follow_up_top_p=0.9)
        prompts = [Prompt(f"p{i}", (f"Say {i}",)) for i in range(4)]
        regenerate(prompts, answerer, tmp_path, config, about={}, users=users)
    finally:
        server.shutdown()
        server.server_close()
    got = records(tmp_path)
    assert {name: r.get("num_written", 0) for name, r in got.items()} == {"p0": 2, "p1": 2, "p2": 0, "p3": 2}
    bodies = {tuple(body["prompt"]): body for body in handler.seen if "prompt" in body}
    for name in ("p0", "p1", "p3"):
        messages = got[name]["messages"]
        for place in (2, 4):
            ids = tokens(TEMPLATE.render(messages[:place]) + USER)
            assert messages[place] == {"role": "user", "content": f"why {len(ids)}?"}
            body = bodies[tuple(ids)]
            assert (body["stop_token_ids"], body["top_p"], body["temperature"]) == ([END], 0.9, 0.8)
    assert answerer.num_refused == 1

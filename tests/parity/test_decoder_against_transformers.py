"""The decoder against `transformers` on tiny random weights, for each family, with and without a KV cache.

What each case catches: llama3 scaling (angles), tied output matrix, a sliding window shorter than the text,
biases of q, k, v, q/k norm, head_dim that is not hidden / heads; the chunked cases catch positions, page
boundaries, padding.
"""

import json

import pytest
import torch
import transformers

from eyas.core.batch import ForwardBatch
from eyas.kernels.reference.rows import page_slots
from eyas.nn.packed import PackedContext
from eyas.nn.paged import PagedContext, allocate_cache
from eyas.targets.load import load_target

SHAPES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
LLAMA3 = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that the 8 frequencies of a 16-wide head fall into all three ranges.
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
}
LENGTHS = (23, 9, 17)
CAPTURE = (1, 2, 4)
TOLERANCE = 1e-5


def make_reference(case, folder, **save):
    """A random transformers model, also saved in `folder`."""
    name, extra = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPES, **extra})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norm scales start at zero and one; a parity test must see them.
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder, **save)
    return model


def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 96, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def reference_outputs(model, ids):
    """Logits and the streams entering layers CAPTURE; the last one is hooked, transformers normalises it."""
    raw = []
    handle = model.model.layers[-1].register_forward_hook(lambda _m, _i, out: raw.append(out))
    out = model(ids[None], output_hidden_states=True)
    handle.remove()
    last = raw[0][0] if isinstance(raw[0], tuple) else raw[0]
    streams = [out.hidden_states[k] if k < 4 else last.reshape(1, -1, 32) for k in CAPTURE]
    return out.logits[0], torch.cat(streams, dim=-1)[0]


def assert_same(ours, theirs):
    assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_reference(request.param, folder)
    target = load_target(folder, tokenizer=False, pack=False)
    return reference, target


def test_without_cache(pair):
    reference, target = pair
    for ids in texts():
        logits, streams = reference_outputs(reference, ids)
        context = PackedContext.of(torch.zeros(1, len(ids), dtype=torch.int64))
        hidden, features = target.decoder(ids[None], torch.arange(len(ids))[None], context, capture=CAPTURE)
        assert_same(target.decoder.logits(hidden)[0], logits)
        assert_same(features[0], streams)


def test_packed_documents(pair):
    """Two texts in one row with padding behind give what each gives alone."""
    reference, target = pair
    first, second, _ = texts()
    ids = torch.cat((first, second, torch.zeros(3, dtype=torch.int64)))[None]
    segments = torch.tensor([[0] * len(first) + [1] * len(second) + [-1] * 3])
    positions = torch.cat((torch.arange(len(first)), torch.arange(len(second)), torch.zeros(3))).long()[None]
    hidden, _ = target.decoder(ids, positions, PackedContext.of(segments, positions))
    got = target.decoder.logits(hidden)[0]
    assert_same(got[: len(first)], reference_outputs(reference, first)[0])
    assert_same(got[len(first) : -3], reference_outputs(reference, second)[0])


def batch_of(ids, begins, ends, page_table, page_size, pad):
    """Rows begins[b] .. ends[b]-1 of each text, and `pad` padding rows for each request that has rows."""
    token_ids, positions, slots, visible, q_start = [], [], [], [], [0]
    for b, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        count = end - begin
        extra = pad if count else 0
        where = torch.arange(begin, end + extra)
        valid = torch.arange(count + extra) < count
        token_ids.append(torch.cat((ids[b][begin:end], torch.zeros(extra, dtype=torch.int64))))
        positions.append(where)
        slots.append(page_slots(page_table[b : b + 1], where[None], page_size, valid[None])[0])
        visible.append(torch.where(valid, where + 1, 0))
        q_start.append(q_start[-1] + count + extra)
    return ForwardBatch(
        token_ids=torch.cat(token_ids),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        visible=torch.cat(visible).int(),
        q_start=torch.tensor(q_start, dtype=torch.int32),
        page_table=page_table.int(),
        max_rows=max(LENGTHS) + pad,
        max_visible=max(LENGTHS),
    )


@pytest.mark.parametrize("chunk", [5, 8])
@pytest.mark.parametrize("pad", [0, 2])
def test_with_cache(pair, chunk, pad):
    """Prefill in chunks, then one token at a time; pages of 4, handed out in scattered order."""
    reference, target = pair
    ids, page_size = texts(), 4
    shuffled = torch.randperm(18, generator=torch.Generator().manual_seed(2)) + 1
    page_table = shuffled.reshape(3, 6)
    cache = allocate_cache(target.decoder.kv_layout, 19, page_size, dtype=torch.float32, device="cpu")
    done, logits, streams = [0, 0, 0], [[], [], []], [[], [], []]
    while any(d < len(t) for d, t in zip(done, ids, strict=True)):
        # The last 4 tokens come one by one, the ones before in chunks: requests mix both in one batch.
        sizes = [
            0 if d == len(t) else 1 if d >= len(t) - 4 else min(chunk, len(t) - 4 - d)
            for d, t in zip(done, ids, strict=True)
        ]
        ends = [d + s for d, s in zip(done, sizes, strict=True)]
        batch = batch_of(ids, done, ends, page_table, page_size, pad)
        hidden, features = target.decoder(
            batch.token_ids, batch.positions, PagedContext(cache, batch), capture=CAPTURE
        )
        for b, size in enumerate(sizes):
            begin = int(batch.q_start[b])
            logits[b].append(target.decoder.logits(hidden[begin : begin + size]))
            streams[b].append(features[begin : begin + size])
        done = ends
    for b in range(3):
        want_logits, want_streams = reference_outputs(reference, ids[b])
        assert_same(torch.cat(logits[b]), want_logits)
        assert_same(torch.cat(streams[b]), want_streams)


@pytest.mark.parametrize("case", ["llama3", "qwen2", "mistral-window"])
def test_sharded_checkpoint_and_packed_weights(case, tmp_path):
    """Several shards load like one file; packed weights give the same up to rounding."""
    reference = make_reference(case, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    target = load_target(tmp_path, tokenizer=False, pack=True)
    ids = texts()[0]
    context = PackedContext.of(torch.zeros(1, len(ids), dtype=torch.int64))
    with torch.inference_mode():
        hidden, _ = target.decoder(ids[None], torch.arange(len(ids))[None], context)
        assert_same(target.decoder.logits(hidden)[0], reference_outputs(reference, ids)[0])


def test_older_config_style(tmp_path):
    """rope_theta and rope_scaling at the top level, as checkpoints from before transformers 5 have them."""
    reference = make_reference("llama3", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope
    path.write_text(json.dumps(values))
    target = load_target(tmp_path, tokenizer=False)
    ids = texts()[0]
    context = PackedContext.of(torch.zeros(1, len(ids), dtype=torch.int64))
    hidden, _ = target.decoder(ids[None], torch.arange(len(ids))[None], context)
    assert_same(target.decoder.logits(hidden)[0], reference_outputs(reference, ids)[0])

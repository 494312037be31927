"""Real models against `transformers` in float32: 128 greedy tokens of ten prompts.

Ours decodes token by token through the paged cache, ten requests of different lengths at once. That
transformers' greedy decoding gives the same tokens follows from its argmax after every prefix of that
output, which one forward of the whole text shows; one prompt is also generated for real.
"""

import pytest
import torch
import transformers

from eyas.core.batch import ForwardBatch
from eyas.kernels.reference.rows import page_slots
from eyas.nn.paged import PagedContext, allocate_cache, uniform_batch
from eyas.targets.fetch import MODELS, models_root
from eyas.targets.gguf_tokenizer import write_tokenizer
from eyas.targets.load import load_target
from eyas.targets.weights.convert import converted

NUM_TOKENS = 128
PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Explain in two sentences why the sky is blue.",
    "Translate to German: The weather is nice today.",
    "List the first 10 prime numbers: 2, 3, 5,",
    "def quicksort(items):\n    ",
    "Summarize the story of Romeo and Juliet.",
    "Give me a recipe for pancakes. Be brief.",
    "Compute 12345 + 678 and show your work.\n\n\tThink step by step.",
]


def prompt_ids(target):
    return [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in PROMPTS
    ]


@torch.inference_mode()
def greedy(target, prompts, page_size=16):
    """NUM_TOKENS greedy tokens after each prompt, decoded together."""
    decoder, count = target.decoder, len(prompts)
    longest = max(map(len, prompts)) + NUM_TOKENS
    pages = -(-longest // page_size)
    table = (torch.arange(count * pages).reshape(pages, count).T + 1).int()
    cache = allocate_cache(
        decoder.kv_layout, count * pages + 1, page_size, dtype=target.dtype, device=target.device
    )
    for b, ids in enumerate(prompts):
        where = torch.arange(len(ids) - 1)
        batch = ForwardBatch(
            token_ids=torch.tensor(ids[:-1]),
            positions=where,
            slots=page_slots(table[b : b + 1], where[None], page_size, torch.ones(1, len(where)).bool())[0],
            visible=(where + 1).int(),
            q_start=torch.tensor([0, len(where)], dtype=torch.int32),
            page_table=table[b : b + 1],
            max_rows=len(where),
            max_visible=len(where),
        )
        decoder(batch.token_ids, batch.positions, PagedContext(cache, batch))
    last = torch.tensor([[ids[-1]] for ids in prompts])
    start = torch.tensor([len(ids) - 1 for ids in prompts])
    out = []
    for _ in range(NUM_TOKENS):
        batch = uniform_batch(
            token_ids=last,
            start=start,
            counts=torch.ones(count, dtype=torch.int64),
            page_table=table,
            page_size=page_size,
            max_position=longest,
            max_visible=longest,
        )
        hidden, _ = decoder(batch.token_ids, batch.positions, PagedContext(cache, batch))
        last, start = decoder.logits(hidden).argmax(-1, keepdim=True), start + 1
        out.append(last)
    return torch.cat(out, dim=1)


def check(path):
    target = load_target(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        converted(path, torch.float32, write_tokenizer), dtype=torch.float32
    ).eval()
    prompts = prompt_ids(target)
    tokens = greedy(target, prompts)
    with torch.inference_mode():
        for ids, ours in zip(prompts, tokens, strict=True):
            text = torch.cat((torch.tensor(ids), ours))
            theirs = model(text[None]).logits[0, len(ids) - 1 : -1].argmax(-1)
            assert torch.equal(ours, theirs)
        text = model.generate(
            torch.tensor([prompts[0]]),
            attention_mask=torch.ones(1, len(prompts[0])),
            pad_token_id=0,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    # min_new_tokens forbids the end tokens, so real generation is comparable up to the first of them.
    ours, theirs = tokens[0].tolist(), text[0, len(prompts[0]) :].tolist()
    end = next((i for i, token in enumerate(ours) if token in target.config.eos_token_ids), NUM_TOKENS)
    assert end > 3
    assert ours[:end] == theirs[:end]
    assert len({tuple(row) for row in tokens.tolist()}) == len(PROMPTS)


@pytest.mark.model("smollm2-135m")
@pytest.mark.slow
def test_smollm2(smollm2_path):
    check(smollm2_path)


@pytest.mark.slow
def test_qwen25_coder():
    path = models_root() / MODELS["qwen2.5-coder-0.5b"].file
    if not path.is_file():
        pytest.skip("fetch it with `eyas models get qwen2.5-coder-0.5b`")
    check(path)

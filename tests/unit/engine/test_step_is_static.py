"""A step reads nothing back to the host: it can stand in a CUDA graph. So do prefill and admission.

Attention is left to its own tests (the reference kernel plans on the host); here it answers with zeros.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.core.sampling import SamplingParams
from eyas.drafters.by_number import ByNumberDrafter
from eyas.engine import logits_processors
from eyas.engine.llm import LLM
from eyas.engine.prefill import prefill_blocks
from eyas.engine.sampler import Needs
from eyas.engine.step import Variant, whole
from eyas.kernels import dispatch
from fakes import make_drafter, random_head
from tiny import tiny_target
from tree_fakes import tree_head

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class NoReads(TorchDispatchMode):
    """Raises on operators whose result's shape or value the host must know."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in READS, f"{name} waits for the device"
        if name in {"index", "index_put", "index_put_"}:
            masks = [x for x in args[1] if x is not None and x.dtype == torch.bool]
            assert not masks, "indexing by a mask waits for the device"
        return func(*args, **(kwargs or {}))


class NoNumbersAtIndices(TorchFunctionMode):
    """Raises on `x[indices] = number`: torch makes the number a tensor, copies it to CUDA and waits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__:
            _, index, value = args
            parts = index if isinstance(index, tuple) else (index,)
            indexed = any(isinstance(part, torch.Tensor) for part in parts)
            assert not indexed or isinstance(value, torch.Tensor), "a number waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_guards_notice():
    with NoReads(), NoNumbersAtIndices():
        for wrong in (
            lambda x: x.max().item(),
            lambda x: x[x > 0],
            lambda x: x.nonzero(),
            lambda x: x.__setitem__(torch.tensor([0, 1]), -1),
        ):
            with pytest.raises(AssertionError, match="waits for the device"):
                wrong(torch.arange(3))


def no_attention(qkv, cos, *_, num_heads, **__):
    return torch.zeros(qkv.shape[0], num_heads, 2 * cos.shape[-1])


def as_on_cuda(monkeypatch):
    monkeypatch.setattr(dispatch, "rotated_attention", no_attention)
    # The CPU looks at the likeliest tokens first, which CUDA does not.
    monkeypatch.setattr(logits_processors, "HEAD", 64)


@pytest.mark.parametrize("needs", [Needs.GREEDY, Needs.SAMPLE, Needs.SAMPLE | Needs.FILTER | Needs.SHAPE])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, shape) for kind in ("eagle3", "peagle") for shape in (None, "4x3x12")), ("depths", None)],
)
def test_no_step_reads_back(kind, shape, needs, monkeypatch):
    target = tiny_target()
    drafter = random_head(target, kind, 4) if shape is None else tree_head(target, kind, shape)
    llm = LLM(target, drafter, max_model_len=64, page_size=4, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.generate([[3, 4, 5]], params)
    runner = llm._runner
    as_on_cuda(monkeypatch)
    slots = torch.tensor([0, 1, runner.state.num_slots])
    for num_drafts in (llm.num_draft_tokens, 0):
        with torch.no_grad(), NoReads(), NoNumbersAtIndices():
            report = whole(runner.models, runner.state, slots, Variant(needs, 1024, num_drafts, 2))
        assert report.rows.shape == (3, (4 if num_drafts else 0) + 3)
        assert report.logprobs.top.shape == (3, (4 if num_drafts else 0) + 1, 2)


@pytest.mark.parametrize("num_drafts", [0, 3, 6, 12])
def test_no_step_of_a_head_in_several_shapes_reads_back(num_drafts, monkeypatch):
    target = tiny_target()
    trees = [tree_head(target, "peagle", shape) for shape in ("4x3x12", "3x2x6")]
    drafter = ByNumberDrafter(trees, random_head(target, "peagle", 3))
    llm = LLM(target, drafter, max_model_len=64, page_size=4, max_num_seqs=4)
    runner = llm._runner
    as_on_cuda(monkeypatch)
    slots = torch.tensor([0, 1, runner.state.num_slots])
    with torch.no_grad(), NoReads(), NoNumbersAtIndices():
        report = whole(runner.models, runner.state, slots, Variant(Needs.GREEDY, 1024, num_drafts))
    assert report.rows.shape == (3, min(4, num_drafts) + 3)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "prompt_lookup", "small_model"])
def test_no_prefill_in_blocks_reads_back(kind, monkeypatch):
    target = tiny_target()
    llm = LLM(target, make_drafter(kind, target, 4, []), max_model_len=64, page_size=4, max_num_seqs=4)
    runner = llm._runner
    as_on_cuda(monkeypatch)
    blocks = torch.tensor([[0, 0, 2, 4], [0, 3, 5, 0], [3, 2, 1, 0]])
    with torch.no_grad(), NoReads(), NoNumbersAtIndices():
        prefill_blocks(runner.models, runner.state, blocks, 3, 1024)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("sample", [False, True])
def test_nothing_between_the_steps_reads_back(kind, sample, monkeypatch):
    """Admission, prefill in chunks, growing pages and rows that are used again, with steps in between."""
    target = tiny_target()
    llm = LLM(
        target,
        random_head(target, kind, 4, sample=sample),
        max_model_len=64,
        page_size=4,
        max_num_seqs=2,
        prefill_chunk=5,
        overlap=True,
    )
    as_on_cuda(monkeypatch)
    rich = {"logit_bias": {5: 1.0}, "min_tokens": 2, "stop_token_ids": (3,)}
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=9, ignore_eos=True, **(rich if t else {}))
        for t in (0.0, 0.7, 0.0, 0.9)
    ]
    with NoReads(), NoNumbersAtIndices():
        outputs = llm.generate_ids([[3, 4, 5], list(range(2, 20)), [7], [9, 9]], params)
    assert [len(output) for output in outputs[::2]] == [9, 9]

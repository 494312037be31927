"""Packed rows draft what unpacked ones do, bit for bit, also from a graph whose counts change."""

import os
from dataclasses import replace

import pytest
import torch

from eyas.core.batch import Committed
from eyas.core.model_config import RopeConfig, TargetConfig
from eyas.core.vocab_map import VocabMap
from eyas.drafters import head_drafter
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.peagle.model import PEagleModel
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.kernels.dispatch import use_backend
from eyas.nn.paged import allocate_cache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
K, PAGE, LENGTH = 7, 16, 256
# 19 requests of 14 rows: more than two blocks, of which one and a part are left out. Of 8: a part of one.
COUNTS = [1, 8, 3, 1, 1, 5, 2, 1, 4, 1, 2, 1, 1, 8, 1, 3, 1, 1, 2]
# Hidden sizes whose products go by parts and by loops with splits.
SIZES = [(32, 4)] if INTERPRETED else [(576, 9), (2048, 16)]


def _drafter(kind, size, heads):
    target = TargetConfig(
        family="llama",
        vocab_size=512,
        hidden_size=size,
        intermediate_size=2 * size,
        num_layers=6,
        num_heads=heads,
        num_kv_heads=heads if heads % 2 else heads // 2,
        head_dim=size // heads,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=LENGTH,
    )
    flags = {"mask_token_id": 511, "num_layers": 3} if kind == "peagle" else {}
    config = HeadConfig.for_target(target, kind=kind, draft_vocab_size=512, **flags)
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(512, size, generator=generator)
    model = (PEagleModel if kind == "peagle" else Eagle3Model)(config, table)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 2 * noise * parameter.shape[-1] ** -0.5)
    model.eval().requires_grad_(requires_grad=False).to(DEVICE, DTYPE)
    chain = PEagleDrafter if kind == "peagle" else Eagle3Drafter
    return chain(model, VocabMap(torch.arange(512), 512), K)


def _committed(counts, feature_size):
    """The real rows are always the same; what is left over differs from call to call."""
    generator = torch.Generator().manual_seed(2)
    num = len(counts)
    features = torch.randn(num, K + 1, feature_size, generator=generator)
    rest = torch.arange(K + 1) >= torch.tensor(counts)[:, None]
    features[rest] = torch.nan
    pages = LENGTH // PAGE
    return Committed(
        tokens=torch.randint(0, 511, (num, K + 1), generator=generator).to(DEVICE),
        features=features.to(DEVICE, DTYPE),
        start=torch.randint(20, 200, (num,), generator=generator).to(DEVICE),
        counts=torch.tensor(counts, device=DEVICE),
        page_table=(torch.arange(num * pages).view(num, pages) + 1).int().to(DEVICE),
        history=torch.zeros(num, 0, dtype=torch.int64, device=DEVICE),
        max_position=LENGTH,
        temperature=torch.zeros(num, device=DEVICE),
        seeds=torch.zeros(num, dtype=torch.int64, device=DEVICE),
    )


def _drafts(drafter, committed, cached):
    """Drafts from a cache that is the same at first, and the cache after."""
    for side, first in zip((drafter._cache.keys, drafter._cache.values), cached, strict=True):
        for layer in side:
            layer.copy_(first)
    tokens = drafter.propose(committed).tokens
    # Page 0 is scratch.
    return tokens, torch.stack([*drafter._cache.keys, *drafter._cache.values])[:, 1:]


@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
@pytest.mark.parametrize(("size", "heads"), SIZES)
@pytest.mark.parametrize("num_requests", [4] if INTERPRETED else [8, len(COUNTS)])
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of rows that are anything
@torch.no_grad()
def test_packed_rows_draft_the_same_bits(kind, size, heads, num_requests, monkeypatch):
    counts = COUNTS[:num_requests]
    drafter = _drafter(kind, size, heads)
    num_pages = len(counts) * (LENGTH // PAGE) + 1
    cache = allocate_cache(drafter.kv_layout, num_pages, PAGE, dtype=DTYPE, device=DEVICE)
    drafter.bind(cache, LENGTH)
    cached = torch.randn(2, *cache.keys[0].shape, generator=torch.Generator().manual_seed(3))
    cached = cached.to(DEVICE, DTYPE)
    committed = _committed(counts, drafter.model.config.feature_size)
    found = []
    with use_backend("triton"):
        for packs in (False, True):
            monkeypatch.setattr(head_drafter, "_packs", lambda _, packs=packs: packs)
            found.append(_drafts(drafter, committed, cached))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    if INTERPRETED:
        return
    # A graph, captured with one set of counts, with the other's.
    monkeypatch.undo()
    monkeypatch.setattr(head_drafter, "PACKED_ROWS", 63)
    other = _committed(counts[::-1], drafter.model.config.feature_size)
    held = replace(other, **{name: getattr(other, name).clone() for name in ("tokens", "features", "counts")})
    drafter.propose(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = drafter.propose(held).tokens
    for given in (committed, other):
        for name in ("tokens", "features", "counts"):
            getattr(held, name).copy_(getattr(given, name))
        drafts, _ = _drafts(drafter, given, cached)
        for side, first in zip((cache.keys, cache.values), cached, strict=True):
            for layer in side:
                layer.copy_(first)
        graph.replay()
        assert torch.equal(made, drafts)

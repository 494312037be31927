"""Matrix products of the decode path against float64 sums; through the interpreter, and on CUDA (gpu).

The CPU run of the Triton tests happens in a child process, as in test_triton_twins.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from eyas.kernels import dispatch
from eyas.kernels.dispatch import use_backend
from eyas.kernels.settings import use_invariant, use_pdl
from eyas.kernels.triton.linear_tiling import WIDE, Tiling, tiling
from eyas.nn.linear import Linear, pack_linears
from eyas.nn.mlp import GatedMLP
from eyas.nn.norm import RMSNorm

if find_spec("triton"):
    import triton
    import triton.language as tl

    from eyas.kernels.triton.linear_short import _in_turn, _squares

    @triton.jit
    def order_kernel(x_ptr, turn_ptr, tree_ptr, P: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
        part, row, k = tl.arange(0, P), tl.arange(0, R), tl.arange(0, L)
        x = tl.load(x_ptr + (part[:, None, None] * R + row[None, :, None]) * L + k[None, None, :])
        tl.store(turn_ptr + row[:, None] * L + k[None, :], _in_turn(x))
        tl.store(tree_ptr + row, _squares(x))


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter multiplies bfloat16 as integers; float16 it gets right.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
ON_GPU_ONLY = pytest.mark.skipif(INTERPRETED, reason="real shapes")
# rows, in, out: whole tiles, less than one, two row blocks and odd sizes, K-splits (from in = 2048 on).
SHAPES = [(1, 64, 32), (3, 72, 40), (70, 130, 33), (5, 2100, 24)]
LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336)}
SMOL_135M = {"qkv": (960, 576), "o": (576, 576), "down": (576, 1536), "fc": (576, 1728)}
QWEN_0_5B = {"qkv": (1152, 896), "o": (896, 896), "down": (896, 4864)}
REAL = {
    f"{model} {name}": shape
    for model, shapes in {"8b": LLAMA_8B, "135m": SMOL_135M, "0.5b": QWEN_0_5B}.items()
    for name, shape in shapes.items()
}
REAL_GATED = {"8b": (14336, 4096), "135m": (1536, 576), "0.5b": (4864, 896)}
HEADS = {"8b": (128256, 4096), "135m": (49152, 576), "draft": (32000, 576)}
ROW_COUNTS = (1, 3, 8, 16, 33, 64, 65, 128, 200, 512, 1100)


def _tolerance(dtype):
    # Sums of up to 2100 products of order 1 / sqrt(in); one rounding of the result in 16 bits.
    return {"atol": 5e-5, "rtol": 5e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


def _random(*shape, dtype, seed, scale=1.0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def _problem(rows, size, out, dtype, seed=0):
    return {
        "x": _random(rows, size, dtype=dtype, seed=seed),
        "weight": _random(out, size, dtype=dtype, seed=seed + 1, scale=size**-0.5),
        "bias": _random(out, dtype=dtype, seed=seed + 2),
        "norm_weight": _random(size, dtype=dtype, seed=seed + 3, scale=0.2) + 1,
        "residual": _random(rows, out, dtype=dtype, seed=seed + 4),
    }


def _exact(x, weight, bias=None, *, norm_weight=None, eps=0.0, residual=None):
    """In float64, and no rounding on the way."""
    x = x.double()
    if norm_weight is not None:
        x = norm_weight.double() * x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    out = torch.einsum("tk,ok->to", x, weight.double())
    out = out if bias is None else out + bias.double()
    return out if residual is None else out + residual.double()


def _exact_gated(x, weight, **norm):
    both = _exact(x, weight, **norm)
    gate, up = both[:, : weight.shape[0] // 2], both[:, weight.shape[0] // 2 :]
    return gate / (1 + (-gate).exp()) * up


EPILOGUES = {
    "plain": (),
    "bias": ("bias",),
    "residual": ("residual",),
    "norm": ("norm_weight",),
    "all": ("bias", "norm_weight", "residual"),
}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("epilogue", "dtype"), [*((name, DTYPES[0]) for name in EPILOGUES), ("all", DTYPES[1])], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.gpu
def test_linear(backend, epilogue, shape, dtype):
    problem = _problem(*shape, dtype)
    chosen = {name: problem[name] for name in EPILOGUES[epilogue]}
    chosen |= {"eps": 1e-3} if "norm_weight" in chosen else {}
    with use_backend(backend):
        actual = dispatch.linear(problem["x"], problem["weight"], **chosen)
    expected = _exact(problem["x"], problem["weight"], **chosen)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, **_tolerance(dtype))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("normed", "dtype"), [(False, DTYPES[0]), (True, DTYPES[1])], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.gpu
def test_gated_linear(backend, normed, shape, dtype):
    rows, size, out = shape
    problem = _problem(rows, size, 2 * out, dtype)
    norm = {"norm_weight": problem["norm_weight"], "eps": 1e-3} if normed else {}
    with use_backend(backend):
        actual = dispatch.gated_linear(problem["x"], problem["weight"], **norm)
    expected = _exact_gated(problem["x"], problem["weight"], **norm)
    assert actual.shape == (rows, out)
    torch.testing.assert_close(actual.double(), expected, **_tolerance(dtype))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 32), (20, 40, 33)], ids=str)
@pytest.mark.gpu
def test_max_linear(backend, normed, shape):
    problem = _problem(*shape, torch.float32)
    norm = {"norm_weight": problem["norm_weight"], "eps": 1e-3} if normed else {}
    ids = torch.arange(shape[2], device=DEVICE) * 3 + 7
    with use_backend(backend):
        largest, index = dispatch.max_linear(problem["x"], problem["weight"], **norm)
        _, mapped = dispatch.max_linear(problem["x"], problem["weight"], **norm, index_map=ids)
    expected = _exact(problem["x"], problem["weight"], **norm)
    torch.testing.assert_close(largest.double(), expected.max(-1).values, **_tolerance(torch.float32))
    assert torch.equal(index, expected.argmax(-1))
    assert torch.equal(mapped, ids[index])


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.gpu
def test_ties_go_to_the_lowest_index_and_nan_wins(backend):
    """Columns 130 and 3 tie in different tiles, 3 and 5 in one; NaN is the largest, as in torch."""
    weight = torch.zeros(200, 32, device=DEVICE)
    weight[[3, 5, 130]] = 1.0
    weight[0] = -1.0
    x = torch.ones(4, 32, device=DEVICE)
    x[1] = -1.0  # all tie at 0 below column 0's +32
    x[2] = 0.0  # everything ties
    x[3, 7] = float("nan")
    with use_backend(backend):
        largest, index = dispatch.max_linear(x, weight)
    assert index.tolist() == [3, 0, 0, 0]
    assert largest[:3].tolist() == [32.0, 32.0, 0.0]
    assert largest[3].isnan()
    weight[77] = float("nan")
    with use_backend(backend):
        largest, index = dispatch.max_linear(x[:1], weight)
    assert index.tolist() == [77]
    assert largest.isnan().all()


@pytest.mark.gpu
def test_leading_shapes_strided_rows_and_no_rows():
    problem = _problem(6, 40, 24, torch.float32)
    wide = torch.cat((problem["x"], problem["x"]), dim=1)
    residual = problem["residual"].view(2, 3, 24)
    with use_backend("triton"):
        whole = dispatch.linear(problem["x"].view(2, 3, 40), problem["weight"], residual=residual)
        slices = dispatch.linear(wide[:, 40:], problem["weight"], residual=problem["residual"])
        none = dispatch.gated_linear(problem["x"][:0], problem["weight"])
        largest, _ = dispatch.max_linear(problem["x"].view(2, 3, 40), problem["weight"])
    assert torch.equal(whole.view(6, 24), slices)
    assert none.shape == (0, 12)
    assert largest.shape == (2, 3)


def _cut(**changes):
    fields = {"block_out": 16, "block_rows": 16, "block_k": 16, "warps": 4, "stages": 2}
    return Tiling(**fields | changes)


CUTS = {
    "splits in turn": [_cut(splits=3, parallel=side) for side in (True, False)],
    "other tiles": [
        _cut(splits=3, parallel=True),
        _cut(splits=3, parallel=True, block_rows=32),
        _cut(splits=3, block_out=32),
    ],
    "copy engine": [_cut(tma=on) for on in (False, True)],
    "parts": [
        _cut(parts=4, block_rows=8, parallel=True),
        _cut(parts=4, parallel=True),
        _cut(parts=4),
        _cut(parts=4, block_out=32, stages=3),
    ],
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.gpu
def test_the_cut_does_not_change_bits(name):
    """The same sums in the same order; float32, so of the tensor cores the real shapes speak."""
    from eyas.kernels.triton import linear as kernels

    problem = _problem(18, 92, 24, torch.float32)
    x, weight = problem["x"], problem["weight"]
    ends = {name: problem[name] for name in ("bias", "norm_weight", "residual")} | {"eps": 1e-3}
    results = []
    for tiles in CUTS[name]:
        results.append(torch.empty(18, 24, device=DEVICE))
        kernels.launch(tiles, x, weight, results[-1], **ends)
        # Whoever arrives last puts the count back, for the next launch that takes its place in the ring.
        assert not any(ring.any() for ring in kernels._counters.values())
    for result in results:
        torch.testing.assert_close(result.double(), _exact(x, weight, **ends), **_tolerance(torch.float32))
        # The interpreter multiplies by numpy, whose own order depends on the tile's shape and strides.
        if not INTERPRETED or name == "splits in turn":
            assert torch.equal(result, results[0])


SUMMED = [_cut(splits=3, parallel=True), _cut(splits=2, parallel=True, block_rows=32)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", SUMMED, ids=str)
@pytest.mark.gpu
def test_a_norm_that_sums_has_the_bits_of_a_product_and_a_norm(cut, dtype, monkeypatch):
    """On rows that count; no others are written."""
    from eyas.kernels.triton import linear as kernels

    monkeypatch.setattr(kernels, "tiling", lambda *_, **__: cut)
    problem = _problem(18, 92, 24, dtype)
    x, residual = problem["x"].view(2, 9, 92), problem["residual"].view(2, 9, 24)
    norm = {"norm_weight": _random(24, dtype=dtype, seed=9) + 1, "eps": 1e-3}
    for live in (None, 18, 7, 0):
        count = None if live is None else torch.tensor([live], dtype=torch.int32, device=DEVICE)
        given = {"residual": residual, "live": count}
        with use_backend("triton"):
            hidden, normed = dispatch.linear_norm(x, problem["weight"], **given, **norm)
            expected = dispatch.linear(x, problem["weight"], **given).view(18, 24)[:live]
            expected_norm = dispatch.rms_norm(expected, *norm.values())
        assert hidden.shape == normed.shape == residual.shape
        assert torch.equal(hidden.view(18, 24)[:live], expected)
        assert torch.equal(normed.view(18, 24)[:live], expected_norm)
    with use_backend("reference"):
        hidden, normed = dispatch.linear_norm(x, problem["weight"], residual=residual, **norm)
        assert torch.equal(hidden, dispatch.linear(x, problem["weight"], residual=residual))
        assert torch.equal(normed, dispatch.rms_norm(hidden, *norm.values()))


@pytest.mark.gpu
def test_a_norm_after_a_product_that_is_not_split_is_left_to_its_reader():
    problem = _problem(3, 72, 40, torch.float32)
    norm = {"norm_weight": problem["bias"], "eps": 1e-3}
    with use_backend("triton"):
        hidden, normed = dispatch.linear_norm(
            problem["x"], problem["weight"], residual=problem["residual"], **norm
        )
        assert torch.equal(
            hidden, dispatch.linear(problem["x"], problem["weight"], residual=problem["residual"])
        )
    assert normed is None


LIVE_CUTS = {
    "loop": _cut(),
    "splits side by side": _cut(splits=3, parallel=True),
    "copy engine": _cut(tma=True),
    "parts": _cut(parts=4),
    "gated": _cut(),
}


@pytest.mark.parametrize("name", LIVE_CUTS)
@pytest.mark.gpu
def test_blocks_of_rows_past_those_that_count_are_left_out(name):
    """The rows that count keep their bits; others are not even written."""
    from eyas.kernels.triton import linear as kernels

    gated = name == "gated"
    problem = _problem(40, 72, 24, torch.float32)
    x, weight = problem["x"], problem["weight"]
    ends = {} if gated else {"bias": problem["bias"], "residual": problem["residual"]}
    ends |= {"norm_weight": problem["norm_weight"], "eps": 1e-3, "gated": gated}
    whole = torch.empty(40, 12 if gated else 24, device=DEVICE)
    kernels.launch(LIVE_CUTS[name], x, weight, whole, **ends)
    for live in (0, 17, 90):
        count = torch.tensor([live], dtype=torch.int32, device=DEVICE)
        some = torch.full_like(whole, 7.0)
        kernels.launch(LIVE_CUTS[name], x, weight, some, **ends, live=count)
        assert not any(ring.any() for ring in kernels._counters.values())
        assert torch.equal(some[:live], whole[:live])
        assert (some[live:] == 7.0).all()


def _middle(*shape, width):
    """A buffer [..., 3 * width] of sevens, and a view of its middle."""
    buffer = torch.full((*shape, 3 * width), 7.0, device=DEVICE)
    return buffer, buffer[..., width : 2 * width]


ALSO_CUTS = {name: cut for name, cut in LIVE_CUTS.items() if name != "gated"}
ALSO_CUTS |= {"parts side by side": CUTS["parts"][0], "splits in turn": _cut(splits=3)}


@pytest.mark.parametrize("name", ALSO_CUTS)
@pytest.mark.gpu
def test_a_second_place_gets_the_same_bits_and_nothing_beside_it_changes(name):
    """Whatever its row stride; rows that do not count are left out there too."""
    from eyas.kernels.triton import linear as kernels

    problem = _problem(40, 72, 24, torch.float32)
    x, weight = problem["x"], problem["weight"]
    ends = {"bias": problem["bias"], "residual": problem["residual"]}
    whole = torch.empty(40, 24, device=DEVICE)
    kernels.launch(ALSO_CUTS[name], x, weight, whole, **ends)
    for live in (None, 17):
        count = None if live is None else torch.tensor([live], dtype=torch.int32, device=DEVICE)
        out, (buffer, also) = torch.full_like(whole, 7.0), _middle(40, width=24)
        kernels.launch(ALSO_CUTS[name], x, weight, out, **ends, live=count, also=also)
        assert torch.equal(out[:live], whole[:live])
        assert torch.equal(also, out)
        also.fill_(7.0)
        assert (buffer == 7.0).all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("cut", [SUMMED[0], _cut()], ids=str)
@pytest.mark.gpu
def test_a_product_and_its_norm_write_a_second_place(cut, backend, monkeypatch):
    from eyas.kernels.triton import linear as kernels

    monkeypatch.setattr(kernels, "tiling", lambda *_, **__: cut)
    problem = _problem(18, 92, 24, torch.float32)
    x, residual = problem["x"].view(2, 9, 92), problem["residual"].view(2, 9, 24)
    norm = {"norm_weight": problem["bias"], "eps": 1e-3}
    for live in (18, 7):
        count = torch.tensor([live], dtype=torch.int32, device=DEVICE)
        given = {"residual": residual, "live": count}
        buffer, also = _middle(2, 9, width=24)
        with use_backend(backend):
            expected = dispatch.linear_norm(x, problem["weight"], **given, **norm)
            got = dispatch.linear_norm(x, problem["weight"], **given, **norm, also=also)
        for one, other in zip((*got, also), (*expected, expected[0]), strict=True):
            assert one is other or torch.equal(one.reshape(18, 24)[:live], other.view(18, 24)[:live])
        if cut in SUMMED and backend == "triton":
            assert (also.reshape(18, 24)[live:] == 7.0).all()
        also.fill_(7.0)
        assert (buffer == 7.0).all()


@pytest.mark.gpu
def test_a_second_place_that_is_no_view_of_rows_is_an_error():
    """A copy of it would be written in vain."""
    problem = _problem(6, 40, 24, torch.float32)
    turned = torch.empty(3, 2, 24, device=DEVICE).transpose(0, 1)
    with use_backend("triton"), pytest.raises(RuntimeError, match="view"):
        dispatch.linear(problem["x"].view(2, 3, 40), problem["weight"], also=turned)


@pytest.mark.parametrize("cut", CUTS["parts"], ids=str)
@pytest.mark.gpu
def test_parts_are_the_same_k_and_added_in_order(cut):
    """Whole numbers: a part is summed exactly; sums of parts need 26 bits and show parts and order."""
    from eyas.kernels.triton import linear as kernels

    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 180_000, (48, 576), generator=generator).double()
    # 9 steps of 16 a part: 8 side by side, and 1 of the last 64.
    parts = [
        torch.cat((weight[:, 128 * p : 128 * (p + 1)], weight[:, 512 + 16 * p : 528 + 16 * p]), dim=1)
        for p in range(4)
    ]
    sums = [part.sum(1).float() for part in parts]
    assert all(float(part.max()) < 2**24 for part in sums)
    expected = ((sums[0] + sums[1]) + sums[2]) + sums[3]
    assert not torch.equal(expected, (sums[0] + sums[1]) + (sums[2] + sums[3]))
    assert not torch.equal(expected, weight.sum(1).float())
    x, out = torch.ones(18, 576, device=DEVICE), torch.empty(18, 48, device=DEVICE)
    kernels.launch(cut, x, weight.float().to(DEVICE), out)
    assert torch.equal(out.cpu(), expected.expand(18, -1))


@pytest.mark.gpu
def test_sums_are_in_the_order_they_say():
    """Float32 sums of other orders have other bits."""
    x = _random(8, 16, 32, dtype=torch.float32, seed=3)
    in_turn, tree = torch.empty(16, 32, device=DEVICE), torch.empty(16, device=DEVICE)
    order_kernel[(1,)](x, in_turn, tree, 8, 16, 32, num_warps=8, enable_fp_fusion=False)
    expected = x[0]
    for part in x[1:]:
        expected = expected + part
    assert torch.equal(in_turn, expected)
    # k is natural: part after part. Neighbours first.
    squares = (x * x).permute(1, 0, 2).reshape(16, -1)
    while squares.shape[1] > 1:
        squares = squares[:, 0::2] + squares[:, 1::2]
    assert torch.equal(tree, squares[:, 0])


def _alone(call, x, residual=None):
    """Each of x's first rows by itself."""
    rows = range(min(4, len(x)))
    parts = [
        call(x[r : r + 1], **({} if residual is None else {"residual": residual[r : r + 1]})) for r in rows
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("epilogue", ["plain", "norm", "residual"])
@pytest.mark.parametrize("name", REAL)
@ON_GPU_ONLY
@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_batch(name, epilogue):
    out, size = REAL[name]
    problem = _problem(max(ROW_COUNTS), size, out, torch.bfloat16)
    norm = {"norm_weight": problem["norm_weight"], "eps": 1e-5} if epilogue == "norm" else {}
    residual = problem["residual"] if epilogue == "residual" else None

    def call(x, residual=None):
        return dispatch.linear(x, problem["weight"], residual=residual, **norm)

    with torch.no_grad():
        alone = _alone(call, problem["x"], residual)
        exact = _exact(problem["x"][:4], problem["weight"], **norm)
        exact = exact if residual is None else exact + residual[:4].double()
        torch.testing.assert_close(alone.double(), exact, atol=3e-2, rtol=2e-2)
        for rows in ROW_COUNTS:
            x = problem["x"][:rows]
            got = call(x, None if residual is None else residual[:rows])
            assert torch.equal(got[:4], alone[: len(got)]), f"{rows} rows"
            # In another place, and beside other rows.
            flipped = call(x.flip(0), None if residual is None else residual[:rows].flip(0))
            assert torch.equal(flipped.flip(0)[:4], alone[: len(got)]), f"{rows} rows, turned round"


@pytest.mark.parametrize("choice", ["off", "late", "early"])
@pytest.mark.parametrize("name", ["8b o", "8b down", "0.5b down", "135m down"])
@ON_GPU_ONLY
@pytest.mark.gpu
def test_a_norm_after_a_product_has_the_same_bits_in_any_batch(name, choice):
    """Of up to 64 rows that read 4,096 wide sums the norm adds the splits; past them it is by itself."""
    out, size = REAL[name]
    problem = _problem(512, size, out, torch.bfloat16)
    x, weight, residual = problem["x"], problem["weight"], problem["residual"]
    norm = {"norm_weight": _random(out, dtype=torch.bfloat16, seed=9) + 1, "eps": 1e-5}
    with torch.no_grad(), use_pdl(choice):
        whole = dispatch.linear(x, weight, residual=residual)
        whole_norm = dispatch.rms_norm(whole, *norm.values())
        for rows in (1, 8, 16, 33, 64, 65, 512):
            hidden, normed = dispatch.linear_norm(x[:rows], weight, residual=residual[:rows], **norm)
            assert (normed is not None) == (
                tiling(out, size, rows).parallel and not tiling(out, size, rows).parts
            )
            assert torch.equal(hidden, whole[:rows]), f"{rows} rows"
            assert normed is None or torch.equal(normed, whole_norm[:rows]), f"{rows} rows"
        # A chain: a kernel that starts too early reads too early.
        if out == size:
            streams = []
            for fused in (True, False):
                hidden, normed = residual[:8], x[:8]
                for _ in range(6):
                    hidden, later = (
                        dispatch.linear_norm(normed, weight, residual=hidden, **norm)
                        if fused
                        else (dispatch.linear(normed, weight, residual=hidden), None)
                    )
                    normed = dispatch.rms_norm(hidden, *norm.values()) if later is None else later
                streams.append(normed)
            assert torch.equal(*streams)


@pytest.mark.parametrize("name", [*REAL, *(f"{model} gate_up" for model in REAL_GATED)])
@ON_GPU_ONLY
@pytest.mark.gpu
def test_the_sums_of_a_row_are_the_same_float32_in_any_batch(name):
    """Before they are rounded to 16 bits, which hides most differences."""
    from eyas.kernels.triton import linear as kernels

    gated = name.endswith("gate_up")
    out, size = REAL_GATED[name.split()[0]] if gated else REAL[name]
    problem = _problem(max(ROW_COUNTS), size, out * 2 if gated else out, torch.bfloat16)

    def sums(x):
        made = torch.empty(len(x), out, device=DEVICE)
        norm = {"norm_weight": problem["norm_weight"], "eps": 1e-5}
        cut = tiling(out, size, len(x), gated=gated)
        kernels.launch(cut, x, problem["weight"], made, gated=gated, **norm)
        return made

    alone = torch.cat([sums(row[None]) for row in problem["x"][:4]])
    for rows in ROW_COUNTS:
        turned = sums(problem["x"][:rows].flip(0)).flip(0)
        assert torch.equal(turned[:4], alone[: len(turned)]), f"{rows} rows"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", REAL_GATED)
@ON_GPU_ONLY
@pytest.mark.gpu
def test_a_gated_row_has_the_same_bits_in_any_batch(name, normed):
    out, size = REAL_GATED[name]
    problem = _problem(max(ROW_COUNTS), size, 2 * out, torch.bfloat16)
    norm = {"norm_weight": problem["norm_weight"], "eps": 1e-5} if normed else {}

    def call(x):
        return dispatch.gated_linear(x, problem["weight"], **norm)

    with torch.no_grad():
        alone = _alone(call, problem["x"])
        exact = _exact_gated(problem["x"][:4], problem["weight"], **norm)
        torch.testing.assert_close(alone.double(), exact, atol=3e-2, rtol=2e-2)
        for rows in ROW_COUNTS:
            assert torch.equal(call(problem["x"][:rows])[:4], alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("name", ["8b qkv", "8b down", "135m qkv", "135m down"])
@ON_GPU_ONLY
@pytest.mark.gpu
def test_rows_that_count_have_the_bits_of_all_rows(name):
    out, size = REAL[name]
    problem = _problem(896, size, out, torch.bfloat16)
    norm = {"norm_weight": problem["norm_weight"], "eps": 1e-5}
    with torch.no_grad():
        whole = dispatch.linear(problem["x"], problem["weight"], residual=problem["residual"], **norm)
        for live in (1, 128, 300, 620, 896):
            x, residual = problem["x"].clone(), problem["residual"].clone()
            x[live:], residual[live:] = float("nan"), float("nan")
            count = torch.tensor([3, live], dtype=torch.int32, device=DEVICE)[1:]
            got = dispatch.linear(x, problem["weight"], residual=residual, live=count, **norm)
            assert torch.equal(got[:live], whole[:live]), f"{live} rows"


@pytest.mark.parametrize("rows", [8, 64, 512])
@pytest.mark.parametrize("options", ["late", "early", "auto", "copy engine"])
@ON_GPU_ONLY
@pytest.mark.gpu
def test_options_that_only_change_speed(options, rows):
    from eyas.kernels.triton import linear as kernels

    problem = _problem(rows, 4096, 4096, torch.bfloat16)
    x, weight, residual = problem["x"], problem["weight"], problem["residual"]
    tiles = tiling(4096, 4096, rows)
    results = []
    for on in (False, True):
        with use_pdl(options if on and options != "copy engine" else "off"):
            stream = x
            # Each product reads the one before it: a kernel that starts too early reads too early.
            for _ in range(6):
                out = torch.empty_like(residual)
                cut = replace(tiles, tma=on and options == "copy engine")
                kernels.launch(cut, stream, weight, out, residual=residual)
                stream = out
        results.append(stream)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("name", HEADS)
@ON_GPU_ONLY
@pytest.mark.gpu
def test_argmax_is_that_of_the_logits_in_any_batch(name):
    out, size = HEADS[name]
    problem = _problem(512, size, out, torch.bfloat16)
    x, weight = problem["x"], problem["weight"]
    with torch.no_grad():
        for rows in (1, 8, 33, 64, 65, 512):
            logits = dispatch.linear(x[:rows], weight)
            largest, index = dispatch.max_linear(x[:rows], weight)
            # The same roundings, so the same ties: of 128,256 bfloat16 logits many rows have one.
            assert torch.equal(index, logits.argmax(-1)), f"{rows} rows"
            assert torch.equal(largest, logits.max(-1).values)


@ON_GPU_ONLY
@pytest.mark.gpu
def test_settings_choose_who_multiplies(monkeypatch):
    from eyas.kernels.triton import linear as kernels

    calls = []
    real = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: calls.append(real(*a, **k)))
    problem = _problem(3, 64, 32, torch.bfloat16)
    x, weight = problem["x"], problem["weight"]
    with torch.no_grad():
        dispatch.linear(x, weight)
        assert len(calls) == 1
        with use_invariant(on=False):
            dispatch.linear(x, weight)
        dispatch.linear(x.float(), weight.float())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            dispatch.linear(x, weight)
    dispatch.linear(x, weight)
    assert len(calls) == 1


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", sorted({*REAL.values(), *REAL_GATED.values(), *HEADS.values(), (40, 5000)}))
def test_what_decides_bits_does_not_depend_on_rows(shape, gated):
    cuts = [tiling(*shape, rows, gated=gated) for rows in range(1, 1200)]
    # With parts both instructions give the same bits, says the test of the float32 sums.
    assert len({(cut.splits, cut.parts, not cut.parts and cut.block_out >= WIDE) for cut in cuts}) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_modules_on_the_cpu_are_their_parts(packed):
    """Norm and residual handed to a module give the bits of writing them out."""
    torch.manual_seed(0)
    norm, layer, mlp = RMSNorm(24, 1e-5), Linear(24, 24, bias=True), GatedMLP(24, 40)
    torch.nn.init.normal_(norm.weight)
    for module in (norm, layer, mlp):
        module.requires_grad_(requires_grad=False)
        if packed:
            pack_linears(module)
    x, residual = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    assert torch.equal(layer(x, norm=norm, residual=residual), residual + layer(norm(x)))
    assert torch.equal(mlp(x, norm=norm, residual=x).hidden, x + mlp(norm(x)).hidden)
    buffer = torch.full((2, 5, 72), 7.0)
    out = mlp(x, norm=norm, residual=x, after=norm, also=buffer[..., 24:48])
    assert torch.equal(buffer[..., 24:48], out.hidden)
    assert (buffer[..., :24] == 7.0).all() and (buffer[..., 48:] == 7.0).all()  # noqa: PT018
    gate, up = mlp.gate_up_proj(norm(x)).chunk(2, dim=-1)
    assert torch.equal(mlp(norm(x)).hidden, mlp.down_proj(torch.nn.functional.silu(gate) * up))
    largest, index = layer.packed.max_linear(x, layer.weight, torch.arange(24) + 100)
    logits = layer.packed.linear(x, layer.weight)
    assert torch.equal(index, logits.argmax(-1) + 100)
    assert torch.equal(largest, logits.max(-1).values)


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

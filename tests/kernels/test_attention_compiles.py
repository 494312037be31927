"""The attention kernels compile for sm_90 without a GPU; the interpreter does not check Triton's types."""

import os
import re

import pytest
from wgmma_descriptors import lost, of_ptx

from eyas.kernels.triton import norm, rotary, rows
from eyas.kernels.triton import paged_attention_kernels as attention
from eyas.kernels.triton.paged_attention_plan import Plan

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

MOST_SHARED_BYTES = 227 * 1024
MOST_SHARED_BYTES_OF_TWO = 113 * 1024
"""Of a program that shares a processor with another: half of 228 KiB less the KiB that the system keeps."""
TYPES = {
    "*i32": ("page_table", "q_start", "visible", "live"),
    "*i64": ("tree_bits", "slots", "positions", "start", "counts", "depths", "bits", "bits_out"),
    "*fp32": ("cos", "sin", "cos_out", "sin_out", "sinks", "acc", "peak", "total", "parts"),
}
SCALARS = {"scale": "fp32", "eps": "fp32"}
HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128}
SMALL = {"NUM_HEADS": 14, "NUM_KV_HEADS": 2, "HEAD_DIM": 64, "BLOCK_D": 64}
TILE = {"CHUNK": 256, "STATE": 64, "BLOCK_M": 32, "UNIFORM": True, "PDL": 1}
TILE |= {"HAS_WINDOW": False, "HAS_TREE": False, "HAS_SINKS": False}
ALL = {"HAS_WINDOW": True, "HAS_TREE": True, "HAS_SINKS": True}
WAYS = {"PAGE_SIZE": 16, "BLOCK_N": 64, "BLOCK_R": 1, "ROTATE": False, "SPLIT": True, "DIRECT": True}
WAYS |= TILE | {"EXACT": False, "ASK": attention.BEFORE.value, "BLOCK_Q": 32}
WALK = {"SPLIT": False, "STATE": 256, "UNIFORM": False}

CASES = {
    "walk": (attention.attention_kernel, HEADS | WAYS | WALK),
    "rotated walk": (attention.attention_kernel, HEADS | WAYS | WALK | {"ROTATE": True, "BLOCK_R": 16}),
    "rotated walk of 16 pairs": (
        attention.attention_kernel,
        HEADS | WAYS | WALK | {"ROTATE": True, "BLOCK_M": 16, "BLOCK_Q": 16},
    ),
    "a program a chunk": (attention.attention_kernel, HEADS | WAYS | {"STATE": 256}),
    "16 pairs": (attention.attention_kernel, HEADS | WAYS | {"BLOCK_M": 16, "BLOCK_Q": 16, "ROTATE": True}),
    "rotated": (attention.attention_kernel, HEADS | WAYS | {"ROTATE": True, "BLOCK_R": 16}),
    "everything": (attention.attention_kernel, SMALL | WAYS | ALL | {"ROTATE": True}),
    "float32": (
        attention.attention_kernel,
        SMALL | WAYS | ALL | {"BLOCK_M": 16, "BLOCK_Q": 16, "BLOCK_N": 32, "EXACT": True, "ROTATE": True},
    ),
    "second pass": (attention.fold_kernel, HEADS | TILE | ALL | {"BATCH": 32}),
    "second pass of chunks": (attention.fold_kernel, HEADS | TILE | {"STATE": 256, "BATCH": 8}),
    "rotation of normed heads": (
        rotary._rotate_and_cache_kernel,
        SMALL | {"HAS_NORM": True, "BLOCK_HEADS": 16, "BLOCK_KV": 2, "PDL": 1},
    ),
    "chain rows": (rows._rows_kernel, {"HAS_TREE": False, "REQUESTS": 0, "BLOCK": 128}),
    "packed rows": (rows._rows_kernel, {"HAS_TREE": False, "REQUESTS": 64, "BLOCK": 32}),
    "tree rows": (rows._rows_kernel, {"HAS_TREE": True, "REQUESTS": 0, "BLOCK": 128}),
    "norm": (
        norm._rms_norm_kernel,
        {"SIZE": 4096, "BLOCK": 4096, "PAIRED": False, "PDL": 1, "live_ptr": None},
    ),
    "norm of a sum": (
        norm._sum_norm_kernel,
        {"SIZE": 4096, "BLOCK": 4096, "PARTS": 2, "PAIRED": False, "PDL": 1, "live_ptr": None},
    ),
    "norm of a sum of rows that count": (
        norm._sum_norm_kernel,
        {"SIZE": 4096, "BLOCK": 4096, "PARTS": 2, "PAIRED": False, "PDL": 1},
    ),
    "norm of a sum that is kept twice": (
        norm._sum_norm_kernel,
        {"SIZE": 4096, "BLOCK": 4096, "PARTS": 2, "PAIRED": False, "PDL": 1, "live_ptr": None, "also": True},
    ),
    "norm of rows that count": (
        norm._rms_norm_kernel,
        {"SIZE": 4096, "BLOCK": 4096, "PAIRED": False, "PDL": 1},
    ),
}


def _compile(kernel, constants, stages):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {f"{name}_ptr": kind for kind, names in TYPES.items() for name in names} | SCALARS
    other = "*fp32" if constants.get("EXACT") else "*bf16"
    if kernel is norm._rms_norm_kernel:
        types["total_ptr"] = other
    constants = dict(constants)
    if not constants.pop("also", False):
        constants |= {name: None for name in kernel.arg_names if name.startswith("also_")}
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = types.get(name, other if name.endswith("_ptr") else "i32")
        signature[name] = "constexpr" if name in constants else kind
        if name not in constants and name.endswith(("_ptr", "query_stride", "also_stride")):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    warps = 1 if kernel is attention.fold_kernel else 4
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiles_and_fits(name):
    kernel, constants = CASES[name]
    exact = constants.get("EXACT", False)
    compiled = _compile(kernel, constants, 1 if exact else 3)
    assert compiled.metadata.shared <= MOST_SHARED_BYTES
    if kernel is attention.attention_kernel:
        # Plans count on two programs a processor.
        assert compiled.metadata.shared <= MOST_SHARED_BYTES_OF_TWO
    if kernel is attention.attention_kernel and not exact:
        ptx = compiled.asm["ptx"]
        # One kind of instruction for any number of pairs.
        assert "wgmma" in ptx
        assert "mma.sync" not in ptx
        # Keys and values come in while others are multiplied.
        assert "cp.async" in ptx
        # Rounding is spelt out: nothing else may contract a product and a sum.
        assert not compiled.metadata.enable_fp_fusion
        assert not lost(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "walk",
        "a program a chunk",
        "rotated",
        "second pass",
        "norm",
        "norm of a sum",
        "rotation of normed heads",
    ],
)
def test_a_kernel_waits_before_it_reads_and_lets_the_next_one_in(name, early):
    kernel, constants = CASES[name]
    ptx = _compile(kernel, constants | {"PDL": 2 if early else 1}, 3).asm["ptx"]
    start, wait = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
    assert (start < wait) == early
    # Before it waits a kernel reads weights (of a norm) or pages and a limit to ask by; it writes nothing.
    asks = kernel is attention.attention_kernel
    allowed = {"norm": 8, "norm of a sum": 8}.get(name, 0) if not asks else 7
    assert ptx[:wait].count("ld.global") <= allowed
    assert "st.global" not in ptx[:wait]
    assert ("prefetch.global.L2" in ptx[:wait]) == asks
    assert "st.global" in ptx[max(start, wait) :]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2304, 4096, 8192])
def test_both_norms_lay_a_row_out_alike_so_they_add_it_alike(size):
    """Sums of wide rows are in the order of the layout: which is one, and the same, in both kernels."""
    constants = {"SIZE": size, "BLOCK": triton.next_power_of_2(size), "PAIRED": False, "PDL": 1}
    constants["live_ptr"] = None
    layouts = []
    for kernel, more in ((norm._rms_norm_kernel, {}), (norm._sum_norm_kernel, {"PARTS": 2})):
        text = _compile(kernel, constants | more, 3).asm["ttgir"]
        assert "convert_layout" not in text
        assert text.count('"tt.reduce"') == 1
        layouts.append(re.findall(r"^#\w+ = #ttg\..*", text, re.MULTILINE))
    assert layouts[0] == layouts[1]
    assert layouts[0]


@pytest.mark.slow
@pytest.mark.parametrize("ask", [attention.NOTHING, attention.UNIT])
def test_nothing_is_asked_for_before_the_wait_unless_launches_are_early(ask):
    constants = CASES["a program a chunk"][1] | {"ASK": ask.value}
    ptx = _compile(attention.attention_kernel, constants, 3).asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    assert "ld.global" not in ptx[:wait]
    assert "prefetch" not in ptx[:wait]
    assert ("prefetch.global.L2" in ptx) == (ask is not attention.NOTHING)


@pytest.mark.slow
def test_one_stage_is_refused_because_the_assembler_loses_addresses():
    with pytest.raises(ValueError, match="ptxas"):
        Plan(16, 64, 1, warps=4, stages=1)
    compiled = _compile(attention.attention_kernel, CASES["rotated"][1], 1)
    if not lost(compiled):
        pytest.skip("this ptxas is right; one stage may come back")
    numbers, operands, written, assembled = zip(*lost(compiled), strict=True)
    # Only the second product, whose weights stand where the keys were.
    products = len(of_ptx(compiled.asm["ptx"]))
    assert set(operands) == {"B"}
    assert min(numbers) >= products // 2
    assert set(assembled) == {None} < set(written) | {None}

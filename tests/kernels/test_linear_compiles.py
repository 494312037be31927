"""The matrix products compile for sm_90 without a GPU, spill nothing and use one instruction a weight."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from eyas.kernels.triton import linear_kernels
from eyas.kernels.triton.linear_parts import parts_kernel
from eyas.kernels.triton.linear_short import short_kernel
from eyas.kernels.triton.linear_tiling import NUM_SMS, SHARED_BYTES, WIDE, tiling
from eyas.kernels.triton.pdl import EARLY, LATE

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
# kind, out, in, rows
SHORT = [
    (kind, out, size, rows)
    for kind, out, size in (
        ("norm", 960, 576),
        ("gated", 1536, 576),
        ("linear", 576, 1536),
        ("linear", 576, 1728),
        ("norm", 1152, 896),
    )
    for rows in (8, 32)
]
SHORT += [("norm", 960, 576, 64)]
PARTS = [
    (kind, out, size, rows) for kind, out, size, few in SHORT if few == 8 for rows in (128, 200, 512, 1400)
]
LOOPS = [
    *(("gated", 14336, 4096, rows) for rows in (8, 64, 128, 512)),
    *(("linear", 6144, 4096, rows) for rows in (8, 64, 128, 512)),
    *(("linear", 4096, 4096, rows) for rows in (8, 32, 64, 512)),
    ("linear", 4096, 14336, 64),
    *(("head", 128256, 4096, rows) for rows in (8, 64, 512)),
    *(("head", 49152, 576, rows) for rows in (8, 64, 512)),
    ("gated", 4864, 896, 512),
    ("linear", 896, 4864, 8),
]
WAITING = [
    (*loop, pdl)
    for loop in (
        ("gated", 14336, 4096, 8),
        ("linear", 4096, 4096, 8),
        ("linear", 6144, 4096, 512),
        ("head", 128256, 4096, 8),
    )
    for pdl in (LATE.value, EARLY.value)
]


def _compile(kernel, constants, tiles, absent, tma=False, also=False):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # A second place for the result is absent but where a test is about it.
    absent = [*absent, *(name for name in kernel.arg_names if name.startswith("also_") and not also)]
    constants = constants | dict.fromkeys(absent)
    types = {"partial_ptr": "*fp32", "arrived_ptr": "*i32", "index_ptr": "*i32", "eps": "fp32"}
    types["live_ptr"] = "*i32"
    if tma:
        types["x_ptr"] = f"tensordesc<bf16[{tiles.block_rows},{tiles.block_k}]>"
        types["weight_ptr"] = f"tensordesc<bf16[{tiles.block_out},{tiles.block_k}]>"
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        default = "*bf16" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
        # The count is a number in the middle of a tensor.
        if (signature[name].startswith("*") and name != "live_ptr") or name.endswith("_stride"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _stack_bytes(compiled, folder):
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


@pytest.mark.slow
@pytest.mark.parametrize("pdl", [0, 1, 2])
@pytest.mark.parametrize(("kind", "out", "size", "rows"), SHORT)
def test_a_short_product_asks_for_everything_before_it_waits(kind, out, size, rows, pdl, tmp_path):
    tiles = tiling(out, size, rows, gated=kind == "gated")
    constants = {"OUT": out, "K": size, "BLOCK_OUT": tiles.block_out, "BLOCK_ROWS": tiles.block_rows}
    constants |= {"PARTS": tiles.parts, "GATED": kind == "gated", "ORDERED": True, "PDL": pdl}
    absent = [
        "bias_ptr",
        *([] if kind != "linear" else ["norm_ptr"]),
        *([] if kind == "linear" else ["residual_ptr"]),
    ]
    compiled = _compile(short_kernel, constants, tiles, absent)
    assert _stack_bytes(compiled, tmp_path) == 0
    ptx = compiled.asm["ptx"]
    first_wait = ptx.index("bar.sync")
    assert "ld.global" in ptx[:first_wait]
    assert "ld.global" not in ptx[first_wait:]
    assert "st.shared" not in ptx[:first_wait]
    assert set(re.findall(r"\S*mma\S*sync\S*", ptx)) == {INSTRUCTION}
    if pdl:
        # Weights are on their way, and only then the kernel before is waited for. The next one may start
        # first of all, or when only results are to be written.
        start, wait = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
        assert ptx.index("ld.global") < wait < ptx.rindex("ld.global")
        if pdl == EARLY.value:
            assert start < ptx.index("ld.global")
        else:
            assert ptx.rindex("mma.sync") < start < ptx.index("st.global")


@pytest.mark.slow
@pytest.mark.parametrize("pdl", [0, 1, 2])
@pytest.mark.parametrize(("kind", "out", "size", "rows"), PARTS)
def test_parts_in_turn_fit_and_use_the_instruction_of_their_width(kind, out, size, rows, pdl, tmp_path):
    tiles = tiling(out, size, rows, gated=kind == "gated")
    assert not tiles.parallel
    constants = {"OUT": out, "K": size, "BLOCK_OUT": tiles.block_out, "BLOCK_ROWS": tiles.block_rows}
    constants |= {"PARTS": tiles.parts, "GATED": kind == "gated", "ORDERED": True}
    constants |= {"PDL": pdl, "PREFETCH": 16 if pdl == EARLY.value else 0}
    # Past 128 rows they may be packed.
    absent = ["bias_ptr", *([] if kind == "linear" else ["residual_ptr"])]
    absent += [] if rows > 128 and not pdl else ["live_ptr"]
    compiled = _compile(parts_kernel, constants, tiles, absent)
    assert _stack_bytes(compiled, tmp_path) == 0
    # Two programs an SM, if there are as many.
    programs = -(-out // tiles.block_out) * -(-rows // tiles.block_rows)
    assert compiled.metadata.shared <= SHARED_BYTES // (2 if programs > NUM_SMS else 1)
    ptx = compiled.asm["ptx"]
    assert "cp.async" in ptx
    # 64 weights are the warp group's, whose steps are 16 wide too: measured, the same bits.
    wide = tiles.block_out >= WIDE
    assert wide == (rows > 128)
    assert ("wgmma" in ptx) == wide
    assert set(re.findall(r"\S*mma\.sync\S*", ptx)) == (set() if wide else {INSTRUCTION})
    if pdl:
        start, wait = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
        assert wait < ptx.index("cp.async")
        if pdl == EARLY.value:
            assert start < ptx.index("prefetch.global.L2") < wait
        else:
            assert "prefetch" not in ptx
            last = ptx.rindex("wgmma.mma_async" if wide else "mma.sync")
            assert last < start < ptx.index("st.global")


@pytest.mark.slow
def test_a_part_of_one_product_is_not_folded_into_the_sum():
    """K 512 in 4 parts is one product a part; the sum over parts must add it, not start it from the total."""
    tiles = tiling(960, 512, 128)
    constants = {"OUT": 960, "K": 512, "BLOCK_OUT": tiles.block_out, "BLOCK_ROWS": tiles.block_rows}
    constants |= {"PARTS": tiles.parts, "GATED": False, "PDL": 0, "PREFETCH": 0}
    added = []
    for ordered in (False, True):
        compiled = _compile(
            parts_kernel, constants | {"ORDERED": ordered}, tiles, ["bias_ptr", "residual_ptr", "live_ptr"]
        )
        added.append(len(re.findall(r"add\.(?:rn\.)?f32", compiled.asm["ptx"])))
    assert added[0] == 0 < added[1]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "out", "size", "rows", "pdl"), [*((*loop, 0) for loop in LOOPS), *WAITING])
def test_a_looped_product_fits_and_uses_its_instruction(kind, out, size, rows, pdl, tmp_path):
    tiles = tiling(out, size, rows, gated=kind == "gated", head=kind == "head")
    assert not tiles.parts
    constants = {"OUT": out, "K": size, "BLOCK_OUT": tiles.block_out, "BLOCK_ROWS": tiles.block_rows}
    constants |= {"BLOCK_K": tiles.block_k, "TMA": tiles.tma, "PDL": pdl}
    constants["PREFETCH"] = 0 if tiles.tma or pdl != EARLY.value else 16
    kernel, absent = linear_kernels.max_kernel, []
    if kind != "head":
        kernel, absent = linear_kernels.linear_kernel, ["bias_ptr"]
        absent += [] if rows > 128 and pdl != EARLY.value else ["live_ptr"]
        absent += [] if tiles.parallel else ["partial_ptr", "arrived_ptr"]
        length = tiles.length(size)
        # A split of one step would be folded into the sum before it, which rounds otherwise.
        assert length >= 2 * tiles.block_k
        constants |= {"SPLITS": tiles.splits, "LENGTH": length}
        constants |= {"PARALLEL": tiles.parallel, "GATED": kind == "gated"}
    compiled = _compile(kernel, constants, tiles, absent, tma=tiles.tma)
    assert _stack_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= SHARED_BYTES
    # One kind of instruction for a weight, whatever the rows: the other one adds in another order.
    assert ("wgmma" in compiled.asm["ptx"]) == (tiles.block_out >= WIDE)
    assert ("mma.sync" in compiled.asm["ptx"]) == (tiles.block_out < WIDE)
    if pdl:
        ptx = compiled.asm["ptx"]
        start, wait = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
        assert wait < ptx.index("cp.async")
        assert "st.global" not in ptx[: max(start, wait)]
        assert start < wait if pdl == EARLY.value else ptx.rindex("wgmma.mma_async") < start


@pytest.mark.slow
@pytest.mark.parametrize("size", [4096, 14336])
@pytest.mark.parametrize("rows", [8, 32, 64])
def test_splits_that_a_norm_will_add_meet_nowhere(rows, size, tmp_path):
    tiles = tiling(4096, size, rows)
    assert tiles.parallel
    constants = {"OUT": 4096, "K": size, "BLOCK_OUT": tiles.block_out, "BLOCK_ROWS": tiles.block_rows}
    constants |= {"BLOCK_K": tiles.block_k, "TMA": tiles.tma, "PDL": LATE.value, "PREFETCH": 0}
    constants |= {"SPLITS": tiles.splits, "LENGTH": tiles.length(size), "PARALLEL": True, "GATED": False}
    absent = ["bias_ptr", "residual_ptr", "arrived_ptr", "live_ptr"]
    compiled = _compile(linear_kernels.linear_kernel, constants, tiles, absent)
    assert _stack_bytes(compiled, tmp_path) == 0
    ptx = compiled.asm["ptx"]
    assert "atom" not in ptx
    assert "wgmma" in ptx
    # Four float32 of a row at a time.
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("st.global")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "size", "rows"),
    [(576, 1536, 8), (576, 1536, 128), (896, 4864, 8), (4096, 14336, 8), (4096, 14336, 512)],
)
def test_a_second_place_is_as_many_stores_again_and_nothing_else(out, size, rows, tmp_path):
    tiles = tiling(out, size, rows)
    constants = {"OUT": out, "K": size, "BLOCK_OUT": tiles.block_out, "BLOCK_ROWS": tiles.block_rows}
    constants |= {"GATED": False, "PDL": LATE.value}
    if tiles.parts:
        kernel, absent = (short_kernel, ["norm_ptr"]) if tiles.parallel else (parts_kernel, ["live_ptr"])
        constants |= {"PARTS": tiles.parts, "ORDERED": True}
    else:
        kernel, absent = linear_kernels.linear_kernel, ["live_ptr"]
        absent += [] if tiles.parallel else ["partial_ptr", "arrived_ptr"]
        constants |= {"BLOCK_K": tiles.block_k, "TMA": tiles.tma, "SPLITS": tiles.splits}
        constants |= {"LENGTH": tiles.length(size), "PARALLEL": tiles.parallel}
    constants |= {} if kernel is short_kernel else {"PREFETCH": 0}
    one, two = (
        _compile(kernel, constants, tiles, ["bias_ptr", *absent], tma=tiles.tma, also=also)
        for also in (False, True)
    )
    assert _stack_bytes(two, tmp_path) == 0
    assert two.metadata.shared == one.metadata.shared
    for what in (r"ld\.global\S*", r"\S*mma\S*sync\S*", r"bar\.sync"):
        assert re.findall(what, two.asm["ptx"]) == re.findall(what, one.asm["ptx"])
    # The last stores of a kernel are the result's; splits leave their sums before them.
    first, second = (re.findall(r"st\.global\S*", compiled.asm["ptx"]) for compiled in (one, two))
    added = second[len(first) :]
    assert added
    assert second == [*first, *added]
    assert first[-len(added) :] == added

"""Corrected guesses compile for sm_90 without a GPU: their room, their instruction, and who waits."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from eyas.kernels.triton import step_markov
from eyas.kernels.triton.pdl import EARLY

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

MOST_SHARED_BYTES = 227 * 1024
# draft ids, rank, requests
SHAPES = [
    *((14848, rank, requests) for rank in (8, 32, 100, 128, 256) for requests in (1, 64)),
    (40, 16, 1),
    (300, 24, 8),
    (32000, 128, 64),
    (49152, 32, 1),
    (128256, 256, 64),
]


def compiled(kernel, constants, kind, warps, pdl, absent=()):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | dict.fromkeys(absent) | {"PDL": pdl}
    types = {"keys_ptr": "*i64", "map_ptr": "*i64", "ids_ptr": "*i64"}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        default = f"*{kind}" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
        if signature[name].startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": pdl > 0}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def depth_of(vocab, rank, requests, *, kind="bf16", pdl=0, first=False, absent=()):
    tiles = step_markov.tiling(vocab, rank, 4 if kind == "fp32" else 2, requests)
    constants = tiles.constants(vocab, rank) | {"NUM_DEPTHS": 7, "SILU": True}
    constants |= {"FIRST": first, "ORDERED": True}
    return compiled(step_markov.markov_kernel, constants, kind, tiles.warps, pdl, absent)


def stack_bytes(kernel, folder):
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


@pytest.mark.slow
@pytest.mark.parametrize("pdl", [0, 1, 2])
@pytest.mark.parametrize(("vocab", "rank", "requests"), SHAPES)
def test_a_depth(vocab, rank, requests, pdl, tmp_path):
    kernel, tiles = depth_of(vocab, rank, requests, pdl=pdl), step_markov.tiling(vocab, rank, 2, requests)
    assert stack_bytes(kernel, tmp_path) == 0
    assert kernel.metadata.shared <= MOST_SHARED_BYTES
    ptx = kernel.asm["ptx"]
    # The same instruction whatever the number of requests.
    assert "wgmma" in ptx
    assert "mma.sync" not in ptx
    if pdl:
        # Only weights are read before the wait, and nothing is written.
        wait, start = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
        assert wait < ptx.index("st.global")
        if pdl == EARLY.value:
            assert start < wait
        else:
            assert wait < ptx.rindex("ld.global" if tiles.steps == 1 else "wgmma.mma_async") < start
        loads = [match.start() < wait for match in re.finditer(r"ld\.global", ptx)]
        assert not all(loads)
        assert any(loads) == (tiles.steps == 1)
    if tiles.steps == 1 and tiles.programs(vocab) > 1:
        # All is on its way before the first barrier but the table's rows, which the guess must be known for.
        barrier, shuffle = ptx.index("bar.sync"), ptx.index("shfl.sync")
        assert "st.shared" not in ptx[:barrier]
        assert barrier < shuffle < ptx.rindex("ld.global") < ptx.index("wgmma.mma_async")


@pytest.mark.parametrize(("vocab", "rank"), [(300, 1024), (14848, 4096), (128256, 16384)])
def test_a_rank_that_no_tile_holds(vocab, rank):
    """R goes through in chunks, whatever a head's rank is."""
    kernel = depth_of(vocab, rank, 64, pdl=1)
    assert kernel.metadata.shared <= MOST_SHARED_BYTES // 1.5
    assert "wgmma" in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("absent", [(), ("pre_ptr",)])
def test_other_types(kind, absent, tmp_path):
    assert stack_bytes(depth_of(14848, 128, 8, kind=kind, absent=absent), tmp_path) == 0


@pytest.mark.parametrize("pdl", [0, 1, 2])
def test_the_first_depth_and_the_last_launch(pdl, tmp_path):
    first = depth_of(14848, 128, 64, pdl=pdl, first=True, absent=("pre_ptr",))
    constants = {"NUM_DEPTHS": 7, "VOCAB": 14848, "P": 116, "PARTS": 128}
    last = compiled(step_markov.markov_ids_kernel, constants, "bf16", 1, pdl)
    for kernel in (first, last):
        assert stack_bytes(kernel, tmp_path) == 0
        ptx = kernel.asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) == (pdl > 0)
        if pdl:
            assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global") < ptx.index("st.global")


def test_a_lone_request_keeps_most_of_the_device_busy():
    tiles = step_markov.tiling(14848, 128, 2, 1)
    assert 100 <= tiles.programs(14848) <= 132
    assert tiles.steps == 1
    assert tiles.chunk == 128


@pytest.mark.parametrize("rank", [8, 24, 128, 256, 512, 1000, 5000])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("vocab", [1, 64, 300, 8193, 14848, 32000, 49152, 128256])
def test_tiles_cover_all_ids_and_no_program_is_empty(vocab, rank, itemsize):
    tiles = step_markov.tiling(vocab, rank, itemsize, 1)
    programs, length = tiles.programs(vocab), tiles.block * tiles.steps
    assert programs <= 128
    assert (programs - 1) * length < vocab <= programs * length
    # What decides bits does not depend on the requests.
    many = step_markov.tiling(vocab, rank, itemsize, 256)
    assert (many.block, many.steps, many.chunk) == (tiles.block, tiles.steps, tiles.chunk)

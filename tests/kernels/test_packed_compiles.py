"""The kernels that pack a head's rows compile for sm_90 without a GPU; the interpreter checks no types."""

import os

import pytest

from eyas.kernels.triton import step_expand

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

INTEGERS = {"tokens_ptr": "*i64", "counts_ptr": "*i64", "q_start_ptr": "*i32", "eps": "fp32"}
EXPAND = {"HAS_MASK": True, "DEPTHS": 0, "NORMED": False, "REQUESTS": 0, "BLOCK": 4096}
CASES = {
    "rows of a head": (step_expand._expand_kernel, EXPAND),
    "packed rows of a head": (step_expand._expand_kernel, EXPAND | {"REQUESTS": 64}),
    "packed, a state a depth": (step_expand._expand_kernel, EXPAND | {"REQUESTS": 64, "DEPTHS": 7}),
    "packed, no mask": (step_expand._expand_kernel, EXPAND | {"REQUESTS": 16, "HAS_MASK": False}),
    "packed, normed": (step_expand._expand_kernel, EXPAND | {"REQUESTS": 16, "NORMED": True}),
    "packing": (step_expand._pack_kernel, {"REQUESTS": 64, "BLOCK": 4096}),
    "newest": (step_expand._newest_kernel, {"BLOCK": 1024, "q_start_ptr": None}),
    "newest of packed rows": (step_expand._newest_kernel, {"BLOCK": 1024}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiles(name):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = CASES[name]
    signature = {
        argument: "constexpr"
        if argument in constants
        else INTEGERS.get(argument, "*bf16" if argument.endswith(("_ptr", "_out")) else "i32")
        for argument in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "st.global" in compiled.asm["ptx"]

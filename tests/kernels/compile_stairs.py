"""Compile the staircase kernels for an H100 or H200 and print what they came to; needs no GPU."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eyas.kernels.triton import slot_backward, slot_forward
from eyas.kernels.triton.slot_tiles import candidates

HALF, INDEX, WIDE = "*bf16", "*i32", "*fp32"
POINTERS = dict.fromkeys(["first_ptr", "last_ptr", "own_ptr", "low_ptr", "high_ptr", "bounds_ptr"], INDEX)
POINTERS |= dict.fromkeys(["lse_ptr", "delta_ptr", "grad_lse_ptr"], WIDE)


def compiled(kernel, tiles, constants):
    names = kernel.arg_names
    signature, fixed, aligned = {}, {}, {}
    for place, name in enumerate(names):
        if name in constants:
            signature[name], fixed[(place,)] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, HALF)
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        if name.endswith(("_ptr", "_stride", "_batch")):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main():
    for heads, group, width in ((32, 4, 128), (9, 3, 64)):
        shared = {"NUM_HEADS": heads, "GROUP": group, "HEAD_DIM": width, "BLOCK_D": width, "EXACT": False}
        for name, kernel, more in (
            ("forward", slot_forward.forward_kernel, {}),
            ("queries", slot_backward.queries_kernel, {}),
            ("keys", slot_backward.keys_kernel, {"OWN": False}),
            ("keys", slot_backward.keys_kernel, {"OWN": True}),
        ):
            tiles = candidates(name, width, torch.bfloat16)[0]
            sizes = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys}
            if name == "keys":
                sizes["PER_BOUND"] = 128 // tiles.keys
            made = compiled(kernel, tiles, shared | sizes | more)
            kind = "wgmma" if "wgmma.mma_async" in made.asm["ptx"] else "no tensor cores"
            print(name, heads, group, width, tiles, kind, "shared", made.metadata.shared)


if __name__ == "__main__":
    main()

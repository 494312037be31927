"""Numeric kernels, called through `eyas.kernels.dispatch`.

`reference/` is plain PyTorch and defines what is right; `triton/` has the same files, names and signatures.
"""

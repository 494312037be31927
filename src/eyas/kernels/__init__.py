"""Numeric kernels. `reference/` is plain PyTorch and defines what is right; `triton/` has the same files,
names and signatures; `dispatch` chooses. Call through `eyas.kernels.dispatch`.
"""

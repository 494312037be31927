"""Triton twins of the reference kernels: same files, names and signatures.

They run on CUDA, and on the CPU under TRITON_INTERPRET=1 (how the tests check them without a GPU).
"""

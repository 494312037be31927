"""Modules that targets and drafters are built from.

They call kernels; what a row attends to is passed in as an AttentionContext, so that training, prefill and
decoding run the very same layers.
"""

"""Rows of keys and values into the pages of a cache."""

from torch import Tensor


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write rows keys, values [T, KV, dh] to `slots` [T] of caches [pages, page_size, KV, dh].

    Rows with slot -1 go to slot 0 of the scratch page 0, which nobody reads.
    """
    where = slots.clamp_min(0)
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, where, keys.to(key_cache.dtype))
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, where, values.to(value_cache.dtype))

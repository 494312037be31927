"""How many KV pages fit, and the caches themselves.

The target and the drafter share page numbers: page p of the drafter's cache belongs to the same request and
the same positions as page p of the target's. One page therefore costs what both keep for its tokens.
"""

import os
from dataclasses import dataclass

import torch

from eyas.core.batch import KVCache, KVLayout
from eyas.core.errors import ConfigError, out_of_memory
from eyas.nn.paged import allocate_cache

CUDA_PAGE_SIZE = 16
CPU_PAGE_SIZE = 256
"""On the CPU a page that holds a whole short request is read as a view, without a gather."""
CPU_CACHE_BYTES = 4 * 2**30
"""Default ceiling on the CPU; memory is touched only as pages are used."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Pages (the scratch page included) and tokens a page."""

    num_pages: int
    page_size: int


def bytes_per_token(layouts: list[KVLayout], dtype: torch.dtype) -> int:
    """Bytes that one cached token takes in all models together."""
    return sum(2 * x.num_layers * x.num_kv_heads * x.head_dim * dtype.itemsize for x in layouts)


def cache_sizes(
    layouts: list[KVLayout],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    max_num_seqs: int,
    page_size: int | None,
    num_pages: int | None,
    gpu_memory_fraction: float,
    workspace_bytes: int,
) -> CacheSizes:
    """Choose page size and number of pages.

    Args:
        layouts: what each model caches per token.
        dtype: of the caches.
        device: where they are.
        max_len: context limit; one request of it must fit, else ConfigError.
        max_num_seqs: requests at once; more pages than they can use are not made.
        page_size: tokens a page; None for the device's default.
        num_pages: pages to give away, without the scratch page; None for what memory allows.
        gpu_memory_fraction: share of the free memory that the caches may take.
        workspace_bytes: kept free for activations and logits of a step.
    """
    if page_size is None:
        page_size = CUDA_PAGE_SIZE if device.type == "cuda" else CPU_PAGE_SIZE
    if page_size < 1:
        raise ConfigError(f"page_size={page_size}: a page holds at least one token")
    per_request = -(-max_len // page_size)
    useful = max_num_seqs * per_request
    if num_pages is None:
        page_bytes = page_size * bytes_per_token(layouts, dtype)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            budget = int(free * gpu_memory_fraction) - workspace_bytes
        else:
            budget = min(CPU_CACHE_BYTES, _free_memory() // 2)
        num_pages = min(useful, budget // page_bytes - 1)
        if num_pages < per_request:
            raise ConfigError(
                f"the KV cache of one request of max_model_len={max_len} tokens needs "
                f"{(per_request + 1) * page_bytes / 2**20:.0f} MiB, but only "
                f"{max(budget, 0) / 2**20:.0f} MiB are free for it: lower max_model_len, or raise "
                "gpu_memory_fraction"
            )
    elif num_pages < per_request:
        raise ConfigError(
            f"num_pages={num_pages} of {page_size} tokens cannot hold one request of "
            f"max_model_len={max_len}: give at least {per_request} pages or lower max_model_len"
        )
    return CacheSizes(num_pages + 1, page_size)


def allocate(layout: KVLayout, sizes: CacheSizes, *, dtype: torch.dtype, device: torch.device) -> KVCache:
    """A zeroed cache of one model."""
    try:
        return allocate_cache(layout, sizes.num_pages, sizes.page_size, dtype=dtype, device=device)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"no memory for a KV cache of {sizes.num_pages} pages of {sizes.page_size} tokens: lower "
            "num_pages or page_size, or the batch and the context"
        ) from None


def _free_memory() -> int:
    """Bytes of physical memory that are free or can be freed, as far as the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - a kernel file
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

"""How many pages there are."""

import pytest
import torch

from eyas.core.batch import KVLayout
from eyas.core.errors import ConfigError
from eyas.engine import kv_cache
from eyas.engine.kv_cache import bytes_per_token, cache_sizes

LAYOUTS = [KVLayout(2, 3, 4), KVLayout(1, 2, 8)]


def sizes(**options):
    defaults = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "max_len": 100,
        "max_num_seqs": 4,
        "page_size": 16,
        "num_pages": None,
        "gpu_memory_fraction": 0.9,
        "workspace_bytes": 0,
    }
    return cache_sizes(LAYOUTS, **{**defaults, **options})


def test_a_token_costs_what_all_models_cache():
    assert bytes_per_token(LAYOUTS, torch.float32) == 4 * (2 * 2 * 3 * 4 + 2 * 1 * 2 * 8)
    assert bytes_per_token(LAYOUTS, torch.bfloat16) == bytes_per_token(LAYOUTS, torch.float32) // 2


def test_no_more_pages_than_all_requests_can_use():
    assert sizes().num_pages == 4 * 7 + 1


def test_the_default_page_on_the_cpu_holds_a_short_request():
    assert sizes(page_size=None) == kv_cache.CacheSizes(4 + 1, 256)


def test_memory_is_the_limit(monkeypatch):
    page = 16 * bytes_per_token(LAYOUTS, torch.float32)
    monkeypatch.setattr(kv_cache, "_free_memory", lambda: 2 * 11 * page)

    assert sizes().num_pages == 11


def test_too_little_memory_for_one_request_says_how_much_is_needed(monkeypatch):
    monkeypatch.setattr(kv_cache, "_free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"max_model_len=100 tokens needs .* lower max_model_len"):
        sizes()


def test_given_pages_do_not_count_the_scratch_page():
    assert sizes(num_pages=7).num_pages == 8
    with pytest.raises(ConfigError, match=r"num_pages=6 of 16 tokens .* at least 7 pages"):
        sizes(num_pages=6)

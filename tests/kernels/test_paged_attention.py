"""Paged attention against nested loops: windows, trees, padding rows, grouped heads, scattered pages."""

import math

import pytest
import torch

from eyas.kernels.reference.kv_write import write_kv
from eyas.kernels.reference.paged_attention import paged_attention

PAGE = 4


def naive(queries, keys, values, starts, visible, *, scale, window, bits):
    """Loops over requests, rows, heads and keys; `keys` and `values` are per request, [length, KV, dh]."""
    out = torch.zeros_like(queries)
    heads, kv_heads = queries.shape[1], keys[0].shape[1]
    for b in range(len(starts) - 1):
        for t in range(starts[b], starts[b + 1]):
            path = [] if bits is None else [visible[t] + j for j in range(63) if bits[t] >> j & 1]
            # A tree row stands at position visible + len(path) - 1, and a window holds that many positions.
            low = -1 if window is None else visible[t] + len(path) - window
            seen = [i for i in range(visible[t]) if i >= low] + path
            if not seen:
                continue
            for h in range(heads):
                g = h // (heads // kv_heads)
                scores = [scale * float(queries[t, h] @ keys[b][i, g]) for i in seen]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights)
                for weight, i in zip(weights, seen, strict=True):
                    out[t, h] += weight / total * values[b][i, g]
    return out


def scattered(per_request, num_pages):
    """A cache with each request's rows in pages of random order (page 0 holds noise), and the page table."""
    generator = torch.Generator().manual_seed(5)
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    widest = max(-(-len(x) // PAGE) for x in per_request)
    cache = torch.full((num_pages, PAGE, *per_request[0].shape[1:]), 1e4)
    table = torch.zeros(len(per_request), widest, dtype=torch.int32)
    for b, rows in enumerate(per_request):
        for page in range(-(-len(rows) // PAGE)):
            table[b, page] = order.pop()
            part = rows[page * PAGE : (page + 1) * PAGE]
            cache[table[b, page], : len(part)] = part
    return cache, table


def problem(lengths, rows, heads=4, kv_heads=2, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    keys = [normal(length, kv_heads, size) for length in lengths]
    values = [normal(length, kv_heads, size) for length in lengths]
    return normal(starts[-1], heads, size), keys, values, starts


def check(lengths, rows, visible, *, window=None, bits=None, kv_heads=2, heads=4):
    queries, keys, values, starts = problem(lengths, rows, heads=heads, kv_heads=kv_heads)
    key_cache, table = scattered(keys, 20)
    value_cache, _ = scattered(values, 20)
    want = naive(queries, keys, values, starts, visible, scale=0.3, window=window, bits=bits)
    got = paged_attention(
        queries,
        key_cache,
        value_cache,
        table,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(visible, dtype=torch.int32),
        scale=0.3,
        max_rows=max(rows),
        max_visible=max(lengths),
        window=window,
        tree_bits=None if bits is None else torch.tensor(bits),
    )
    assert torch.allclose(got, want, atol=1e-5)
    return got


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (9, 3)])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_chains(heads, window):
    """A decode row, a draft chain and a prefill chunk in one batch."""
    visible = [6, 9, 10, 11, 12, *range(1, 8)]
    check([6, 12, 7], [1, 4, 7], visible, window=window, heads=heads[0], kv_heads=heads[1])


def test_one_page_and_page_edges():
    """Lengths at, just below and just above a page boundary."""
    for length in (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE - 1):
        check([length], [1], [length])


def test_padding_rows_are_zero():
    """Rows that see nothing give zeros, beside rows that see something and in a request of their own."""
    got = check([8, 5, 3], [3, 2, 2], [7, 8, 0, 0, 0, 3, 0])
    assert (got[[2, 3, 4, 6]] == 0).all()
    assert (got[[0, 1, 5]] != 0).any(-1).all()


def test_rows_may_see_less_than_their_request_holds():
    """Stale keys past `visible` (rejected drafts) are not read, whatever the row's place."""
    check([12], [3], [4, 9, 2])


def test_trees():
    """Root with two children and a grandchild; a tree after one token; a padding request."""
    first, second = [0b0001, 0b0011, 0b0101, 0b1011], [0b001, 0b011, 0b101]
    visible = [5, 5, 5, 5, 1, 1, 1, 0, 0]
    got = check([5 + 4, 1 + 3, 2], [4, 3, 2], visible, bits=[*first, *second, 0, 0])
    assert (got[-2:] == 0).all()


@pytest.mark.parametrize("window", [None, 3, 5])
def test_trees_after_nothing_and_in_windows(window):
    """A tree at the start of its request (visible 0), one whose prefix outgrows the window, and padding."""
    first, second = [0b0001, 0b0011, 0b0101, 0b1011], [0b001, 0b011, 0b111]
    visible = [0, 0, 0, 0, 7, 7, 7, 0]
    got = check([4, 7 + 3, 2], [4, 3, 1], visible, bits=[*first, *second, 0], window=window)
    assert (got[:7] != 0).any(-1).all()
    assert (got[-1] == 0).all()


def test_bits_may_name_keys_of_earlier_forwards():
    """A drafter's second forward has 2 rows at visible + 3 and visible + 4, below rows of its first
    forward."""
    check([6 + 5], [2], [6, 6], bits=[0b01001, 0b10101])


def test_bit_62_is_the_last():
    """63 rows in a tree: a chain of all of them, and its last row."""
    check([3 + 63], [2], [3, 3], bits=[2**63 - 1, 2**62 | 1])


def test_tree_that_is_a_chain():
    """A tree in which every row sees all before it equals the chain."""
    queries, keys, values, starts = problem([9], [4])
    (key_cache, table), (value_cache, _) = scattered(keys, 20), scattered(values, 20)
    start = torch.tensor(starts, dtype=torch.int32)

    def run(visible, bits):
        return paged_attention(
            queries,
            key_cache,
            value_cache,
            table,
            start,
            torch.tensor(visible, dtype=torch.int32),
            scale=1.0,
            max_rows=4,
            max_visible=9,
            tree_bits=bits,
        )

    tree = run([5] * 4, torch.tensor([0b1, 0b11, 0b111, 0b1111]))
    assert torch.allclose(tree, run([6, 7, 8, 9], None), atol=1e-6)


def test_write_kv():
    """Rows land in their slots; slot -1 goes to the scratch page and nowhere else."""
    keys, values = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    key_cache, value_cache = torch.zeros(5, PAGE, 2, 8), torch.zeros(5, PAGE, 2, 8)
    slots = [2 * PAGE + 3, -1, 4 * PAGE, 3 * PAGE + 1]
    write_kv(keys, values, key_cache, value_cache, torch.tensor(slots))
    want = {slot: row for row, slot in enumerate(slots) if slot >= 0}
    for page in range(1, 5):
        for offset in range(PAGE):
            row = want.get(page * PAGE + offset)
            expected = (0, 0) if row is None else (keys[row], values[row])
            assert (key_cache[page, offset] == expected[0]).all()
            assert (value_cache[page, offset] == expected[1]).all()

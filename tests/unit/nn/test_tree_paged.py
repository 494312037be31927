"""Tree rows in pages, and the move of accepted ones, against loops over indices."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.core.batch import KVCache
from eyas.nn.tree_paged import move_rows, tree_batch


def test_rows_of_trees():
    """The module's example at start 5, and a request that has one page less than its tree."""
    batch = tree_batch(
        token_ids=torch.arange(8).view(2, 4),
        depths=torch.tensor([[0, 1, 1, 2]]).expand(2, -1),
        bits=torch.tensor([[1, 3, 5, 11]]).expand(2, -1),
        start=torch.tensor([5, 13]),
        first=0,
        page_table=torch.tensor([[3, 1, 2, 0], [7, 5, 6, 4]], dtype=torch.int32),
        page_size=4,
        max_position=15,
        max_visible=15,
    )
    assert batch.positions.tolist() == [5, 6, 6, 7, 13, 14, 14, 15]
    assert batch.slots.tolist() == [5, 6, 7, 8, 17, 18, -1, -1]
    assert batch.visible.tolist() == [5, 5, 5, 5, 13, 13, 0, 0]
    assert batch.tree_bits.tolist() == [1, 3, 5, 11, 1, 3, 0, 0]
    assert batch.q_start.tolist() == [0, 4, 8]


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_move_equals_a_loop(seed, page_size, depth, num_requests):
    """Random paths, many of which overlap their destinations; a stage of old rows in Python lists."""
    generator = torch.Generator().manual_seed(seed)
    rows, max_len = 3 * depth + 1, 40
    pages = -(-max_len // page_size)
    order = torch.randperm(num_requests * pages, generator=generator) + 1
    table = order.view(num_requests, pages).to(torch.int32)

    def tensors():
        shape = (num_requests * pages + 1, page_size, 2, 3)
        return [torch.randn(shape, generator=generator) for _ in range(2)]

    cache = KVCache(tensors(), tensors(), page_size)
    start = torch.randint(0, max_len - rows, (num_requests,), generator=generator)
    counts = torch.randint(1, depth + 2, (num_requests,), generator=generator)
    nodes = torch.zeros(num_requests, depth + 1, dtype=torch.int64)
    for b in range(num_requests):
        picks = (torch.randperm(rows - 1, generator=generator)[:depth] + 1).sort().values
        nodes[b, 1:] = picks

    def view(tensor, b, index):
        return tensor[int(table[b, index // page_size]), index % page_size]

    wanted = []
    for tensor in (*cache.keys, *cache.values):
        for b in range(num_requests):
            old = [view(tensor, b, index).clone() for index in range(max_len)]
            new = list(old)
            for d in range(int(counts[b])):
                new[int(start[b]) + d] = old[int(start[b] + nodes[b, d])]
            wanted.append(torch.stack(new))
    move_rows(cache, table, start, nodes, counts, max_len)
    got = [
        torch.stack([view(tensor, b, index) for index in range(max_len)])
        for tensor in (*cache.keys, *cache.values)
        for b in range(num_requests)
    ]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))

"""Slots of positions and uniform batches, against loops."""

import torch

from eyas.kernels.reference.rows import page_slots
from eyas.nn.paged import uniform_batch


def test_page_slots_against_a_loop():
    table = torch.tensor([[7, 2, 5], [1, 9, 0]])
    positions = torch.tensor([[3, 4, 11, 12], [0, 7, -1, 100]])
    valid = torch.tensor([[True, True, True, True], [True, False, True, True]])
    slots = page_slots(table, positions, 4, valid)
    for b in range(2):
        for r in range(4):
            p = int(positions[b, r])
            fits = bool(valid[b, r]) and 0 <= p < 12
            assert slots[b, r] == (int(table[b, p // 4]) * 4 + p % 4 if fits else -1)


def test_uniform_batch():
    """Two requests of three rows; the first has two real rows, the second reaches the limit at position 9."""
    batch = uniform_batch(
        token_ids=torch.tensor([[10, 11, 12], [20, 21, 22]]),
        start=torch.tensor([5, 8]),
        counts=torch.tensor([2, 3]),
        page_table=torch.tensor([[7, 2, 3], [4, 6, 8]], dtype=torch.int32),
        page_size=4,
        max_position=10,
        max_visible=16,
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 21, 22]
    assert batch.positions.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.visible.tolist() == [6, 7, 0, 9, 10, 0]
    assert batch.slots.tolist() == [2 * 4 + 1, 2 * 4 + 2, -1, 8 * 4, 8 * 4 + 1, -1]
    assert batch.q_start.tolist() == [0, 3, 6]
    assert batch.uniform_rows == batch.max_rows == 3

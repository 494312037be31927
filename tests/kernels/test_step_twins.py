"""Kernels between the forwards of a step against their reference twins: on CUDA, else in the interpreter.

As in test_triton_twins.py, the CPU run happens in a child process with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys

import pytest
import torch

from eyas.kernels import dispatch_step
from eyas.kernels.dispatch import use_backend
from eyas.kernels.reference.step_expand import MaskRow
from eyas.kernels.reference.step_grow import Pool
from eyas.kernels.reference.step_settle import StateRows
from eyas.kernels.reference.step_take import Source

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter keeps bfloat16 as raw 16-bit integers; float16 it gets right.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 2e-2, "rtol": 2e-2},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}
S = 6
"""Request slots; row S is the trash row."""


def _state_rows(num_rows, generator, num_eos=2):
    def number(high):
        return torch.randint(0, high, (S + 1,), generator=generator)

    length = number(20)
    rows = StateRows(
        last_token=number(9),
        length=length,
        live=torch.tensor([True, True, True, False, True, True, False]),
        history=torch.randint(0, 9, (S + 1, 40), generator=generator),
        # From far away to reached by the first token.
        limit=length + 2 + number(2 * num_rows),
        stops_at_eos=number(2).bool(),
        eos_ids=torch.tensor([7, 3][:num_eos], dtype=torch.int64),
    )
    return StateRows(*[tensor.to(DEVICE) for tensor in rows])


@pytest.mark.parametrize("num_eos", [0, 2])
@pytest.mark.parametrize("match", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 1, 8])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.gpu
def test_settle(seed, num_drafts, match, num_eos):
    """Few tokens, so that drafts are right now and then; padding, off rows, NaN, limits, ends of text."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([2, 0, 5, S, 3, S], device=DEVICE)
    num_rows = num_drafts + 1
    tokens = torch.randint(0, 9, (6, num_rows), generator=generator)
    right = torch.rand(6, num_drafts, generator=generator) < 0.7
    drafts = torch.where(
        right, tokens[:, :num_drafts], torch.randint(-1, 9, right.shape, generator=generator)
    )
    wider = torch.full((6, num_drafts + 2), 5)  # drafts may be a slice of wider rows
    wider[:, :num_drafts] = drafts
    counts = None if match else torch.randint(1, num_rows + 1, (6,), generator=generator).to(DEVICE)
    bad = (torch.rand(6, num_rows, generator=generator) < 0.1).to(DEVICE)
    state = _state_rows(num_rows, generator, num_eos)
    results = []
    for backend in ("reference", "triton"):
        rows = StateRows(*[tensor.clone() for tensor in state])
        with use_backend(backend):
            out = dispatch_step.settle(
                tokens.to(DEVICE),
                counts,
                bad,
                wider.to(DEVICE)[:, :num_drafts],
                slots,
                rows.length[slots],
                rows,
            )
        results.append([*out, *rows])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("max_len", [None, 12])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.gpu
def test_take(num_drafts, max_len):
    generator = torch.Generator().manual_seed(num_drafts)

    def number(*shape, low=0, high=20):
        return torch.randint(low, high, shape, generator=generator)

    source = Source(
        last_token=number(S + 1),
        length=number(S + 1),
        live=number(S + 1, high=2).bool(),
        drafts=number(S + 1, 5, low=-1),
        draft_limit=number(S + 1, high=6),
        page_table=number(S + 1, 1500).int(),
        temperature=torch.rand(S + 1, 6, generator=generator)[:, 1],
        seeds=number(S + 1, 4)[:, 2],
    )
    source = Source(*[tensor.to(DEVICE) for tensor in source])
    slots = torch.tensor([2, 0, S, 5, S], device=DEVICE)
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            results.append(dispatch_step.take(slots, source, num_drafts, max_len))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("rows", "extra", "depths"),
    [(1, None, 0), (4, None, 0), (4, 0, 0), (4, 3, 0), (1, 6, 0), (4, 3, 3), (1, 6, 7), (4, 5, 1)],
)
@pytest.mark.gpu
def test_expand_and_newest(rows, extra, depths, normed, dtype):
    """Without a mask (EAGLE-3), and with one, shared or by depth; a committed mask token."""
    generator = torch.Generator().manual_seed(rows)

    def number(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    size, num_requests = 40, 3
    tokens = torch.randint(0, 9, (num_requests, rows), generator=generator).to(DEVICE)
    tokens[1, 0] = 7
    counts = torch.randint(1, rows + 1, (num_requests,), generator=generator).to(DEVICE)
    masked = (depths, size) if depths else (size,)
    mask = None if extra is None else MaskRow(7, number(size), number(*masked))
    arguments = (
        tokens,
        counts,
        number(num_requests * rows, size),
        number(9, size),
        number(size),
        number(size),
    )
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            inputs, residual = dispatch_step.expand(
                *arguments, 1e-5, mask=mask, extra=extra or 0, normed_residual=normed
            )
            results.append((inputs, residual, dispatch_step.newest(residual, counts, 1 + (extra or 0))))
    torch.testing.assert_close(results[1][0], results[0][0], **TOLERANCE[dtype])
    exact = {"atol": 0.0, "rtol": 0.0}
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(other, one, **(TOLERANCE[dtype] if normed else exact))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("extra", "depths"), [(None, 0), (0, 0), (3, 0), (3, 2)])
@pytest.mark.gpu
def test_packed_rows_are_the_rows_that_count(extra, depths, normed, backend):
    """Bit for bit those of the unpacked layout, request after request, from features to the guessing rows."""
    generator = torch.Generator().manual_seed(3)

    def number(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    size, num_requests, rows = 24, 5, 4
    tokens = torch.randint(0, 9, (num_requests, rows), generator=generator).to(DEVICE)
    counts = torch.tensor([2, 4, 1, 1, 3], device=DEVICE)
    mask = (
        None if extra is None else MaskRow(7, number(size), number(*((depths, size) if depths else (size,))))
    )
    options = {"mask": mask, "extra": extra or 0, "normed_residual": normed}
    hidden = number(num_requests * rows, size)
    given = (number(9, size), number(size), number(size), 1e-5)
    each = [rows + (extra or 0)] * num_requests
    with use_backend(backend):
        packed_hidden, starts = dispatch_step.pack(hidden, counts)
        assert starts.tolist() == [0, 2, 6, 7, 8, 11]
        assert starts.dtype == torch.int32
        kept = [part[:count] for part, count in zip(hidden.split(rows), counts.tolist(), strict=True)]
        assert torch.equal(packed_hidden[:11], torch.cat(kept))
        plain = dispatch_step.expand(tokens, counts, hidden, *given, **options)
        packed = dispatch_step.expand(tokens, counts, packed_hidden, *given, **options, packed=True)
        q_start = torch.nn.functional.pad((counts + options["extra"]).cumsum(0), (1, 0)).int()
        for one, other in zip(plain, packed, strict=True):
            live = (counts + options["extra"]).tolist()
            kept = [part[:count] for part, count in zip(one.split(each), live, strict=True)]
            assert torch.equal(other[: sum(live)], torch.cat(kept))
        newest = dispatch_step.newest(plain[1], counts, 1 + options["extra"])
        assert torch.equal(dispatch_step.newest(packed[1], counts, 1 + options["extra"], q_start), newest)


@pytest.mark.parametrize("shared", [True, False], ids=["one storage", "a tensor a layer"])
@pytest.mark.gpu
def test_move_nodes(shared):
    generator = torch.Generator().manual_seed(0)
    shape = (9, 4, 2, 12)
    if shared:
        storage = torch.randn(2, 3, *shape, generator=generator).to(DEVICE)
        caches = [list(storage[0]), list(storage[1])]
    else:
        caches = [[torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3)] for _ in range(2)]
    page_table = torch.tensor([[3, 7, 1], [8, 2, 5], [4, 6, 0], [0, 0, 0]], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([2, 5, 6, 0], device=DEVICE)
    nodes = torch.tensor([[0, 2, 3, 5], [0, 1, 4, 6], [0, 3, 4, 4], [0, 0, 0, 0]], device=DEVICE)
    counts = torch.tensor([4, 4, 3, 1], device=DEVICE)
    results = []
    for backend in ("reference", "triton"):
        copies = [list(torch.stack(layers)) if shared else [x.clone() for x in layers] for layers in caches]
        with use_backend(backend):
            dispatch_step.move_nodes(*copies, page_table, start, nodes, counts, 11)
        results.append(torch.stack([torch.stack(layers) for layers in copies]))
    # Page 0 is scratch: the reference parks unmoved rows there.
    assert torch.equal(results[0][:, :, 1:], results[1][:, :, 1:])
    assert not torch.equal(results[1], torch.stack([torch.stack(layers) for layers in caches]))


def _random_parents(num_drafts, max_depth, generator, num_trees=6):
    """Parents of random trees, int64 [B, N], of at most max_depth."""
    parents = torch.zeros(num_trees, num_drafts, dtype=torch.int64)
    for tree in range(num_trees):
        depths = [0]
        for node in range(num_drafts):
            shallow = [row for row, depth in enumerate(depths) if depth < max_depth]
            parents[tree, node] = shallow[int(torch.randint(len(shallow), (), generator=generator))]
            depths.append(depths[int(parents[tree, node])] + 1)
    return parents


@pytest.mark.parametrize(("num_drafts", "max_depth"), [(1, 1), (6, 3), (24, 5), (62, 8), (62, 62)])
@pytest.mark.gpu
def test_trees_and_their_paths(num_drafts, max_depth):
    generator = torch.Generator().manual_seed(num_drafts)
    parents = _random_parents(num_drafts, max_depth, generator)
    if max_depth == 62:
        parents[0] = torch.arange(62)
    # Two tokens only: long paths, and siblings that are equal.
    tokens = torch.randint(0, 2, (6, num_drafts + 1), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.1] = -1
    choices = torch.randint(0, 2, (6, num_drafts + 1), generator=generator)
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            shape = dispatch_step.tree_shape(parents.to(DEVICE), max_depth)
            path = dispatch_step.accept_path(choices.to(DEVICE), tokens.to(DEVICE), *shape, max_depth)
            results.append((*shape, *path))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "top_k"), [(40, 4), (2048, 1), (5000, 10)])
@pytest.mark.gpu
def test_top_logprobs(size, top_k, dtype):
    generator = torch.Generator().manual_seed(size)
    # Distinct values: which of equals the library names is up to it.
    order = torch.stack([torch.randperm(size, generator=generator) for _ in range(6)]).view(3, 2, size)
    values = order.float() / size
    if dtype != torch.float32:
        values = torch.where(order >= size - top_k, 20.0 + order - size, values)
    logits = values.to(DEVICE, dtype)
    index_map = torch.arange(size, device=DEVICE) * 3
    for ids in (None, index_map):
        results = []
        for backend in ("reference", "triton"):
            with use_backend(backend):
                results.append(dispatch_step.top_logprobs(logits, top_k, ids))
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("children", [True, False])
@pytest.mark.parametrize(
    ("depth", "top_k", "width", "num_drafts"), [(1, 4, 4, 3), (4, 3, 3, 12), (5, 10, 30, 40)]
)
@pytest.mark.gpu
def test_growing_a_tree(depth, top_k, width, num_drafts, children):
    """Scores in steps of a quarter, so that many are equal and the order among them shows."""
    generator = torch.Generator().manual_seed(depth)
    capacity = depth * (width * top_k if children else width)
    results = []
    levels = []
    nodes = 1
    for _ in range(depth):
        log_q = -torch.randint(0, 9, (3, nodes, top_k), generator=generator).float() / 4
        tokens = torch.randint(0, 99, (3, nodes, top_k), generator=generator)
        levels.append((tokens.to(DEVICE), log_q.sort(-1, descending=True).values.to(DEVICE)))
        nodes = min(width, nodes * top_k)
    for backend in ("reference", "triton"):
        pool = Pool(
            torch.zeros(3, capacity, dtype=torch.int64, device=DEVICE),
            torch.zeros(3, capacity, device=DEVICE),
            torch.zeros(3, capacity, dtype=torch.int64, device=DEVICE),
            torch.zeros(3, capacity, dtype=torch.bool, device=DEVICE),
        )
        frontier, size, found = None, 0, []
        with use_backend(backend):
            for tokens, log_q in levels:
                new = min(width, tokens[0].numel())
                bit = 2 * len(found)
                frontier = dispatch_step.grow(
                    pool, size, frontier, tokens, log_q, new, bit, children=children
                )
                size += tokens[0].numel() if children else new
                found += [*frontier]
            found += [*dispatch_step.best(pool, size, min(num_drafts, size))]
        results.append([*found, *[field[:, :size] for field in pool]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.gpu
def test_a_request_of_nan_still_gets_a_tree():
    """Its tokens are never accepted, but every index must be valid: its neighbours are in the same launch."""
    logits = torch.randn(2, 3, 50, device=DEVICE)
    logits[0] = float("nan")
    with use_backend("triton"):
        ids, log_q = dispatch_step.top_logprobs(logits, 3)
        assert ids.min() >= 0
        assert ids.max() < 50
        pool = Pool(
            torch.zeros(2, 12, dtype=torch.int64, device=DEVICE),
            torch.zeros(2, 12, device=DEVICE),
            torch.zeros(2, 12, dtype=torch.int64, device=DEVICE),
            torch.zeros(2, 12, dtype=torch.bool, device=DEVICE),
        )
        log_q[0] = float("nan")
        frontier = dispatch_step.grow(pool, 0, None, ids[:, :1], log_q[:, :1], 3)
        assert frontier.entries.tolist() == [[0, 1, 2]] * 2
        frontier = dispatch_step.grow(pool, 3, frontier, ids, log_q, 3)
        assert frontier.above.min() >= 0
        assert frontier.above.max() < 3
        _, parents = dispatch_step.best(pool, 12, 8)
    assert all(0 <= parent <= row for tree in parents.tolist() for row, parent in enumerate(tree))


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_twins_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

"""What the device knows about the running requests: one row a request slot.

Rows 0 .. S - 1 belong to requests. Row S is the trash row: padding of a CUDA-graph bucket points to it, it
always has length 0 and its page table points to the scratch page 0. All tensors keep their address, so
graphs may read and write them.

Example, slot 2 decodes a prompt [11, 12, 13] that has given [14, 15] so far, K = 3, max_len 64:
    history[2]     11 12 13 14 15 * * ...      entries from here on are left over or zero
    length[2]      4                           tokens 11 .. 14 are cached
    last_token[2]  15                          stands at position 4 = length
    drafts[2]      guesses for positions 5, 6, 7, or -1
    live[2]        True; a row that has ended (limit or end of text) is off, and so is the trash row for good

The host learns of a step's tokens one step late. A row that ends on the device is switched off there, so that
the step which runs meanwhile neither moves it on nor reads or writes its pages.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from eyas.core.tree import TreeBudget
from eyas.engine.request import Request
from eyas.engine.sampler_state import SamplingState
from eyas.kernels.reference.step_settle import StateRows
from eyas.kernels.reference.step_take import Source

ALIGNMENT = 16
"""Elements; kernels are compiled anew for addresses that are not multiples of 16 bytes."""


class EngineState:
    """Tensors of S + 1 rows; see the module for what a row means."""

    def __init__(
        self,
        num_slots: int,
        *,
        num_draft_tokens: int,
        tree: TreeBudget | None = None,
        max_len: int,
        page_size: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str,
    ) -> None:
        rows, pages = num_slots + 1, -(-max_len // page_size)
        self.num_slots, self.max_len, self.page_size = num_slots, max_len, page_size
        self.num_draft_tokens, self.vocab_size = num_draft_tokens, vocab_size
        self.tree = tree
        self.device = torch.device(device)
        # Rows of one tensor, so that one launch can fill a slot of all; each begins at an aligned address.
        aligned = -(-rows // ALIGNMENT) * ALIGNMENT
        self._numbers = torch.zeros(4, aligned, dtype=torch.int64, device=device)[:, :rows]
        self._flags = torch.zeros(2, aligned, dtype=torch.bool, device=device)[:, :rows]
        self.last_token, self.length, self.limit, self.draft_limit = self._numbers.unbind(0)
        self.live, self.stops_at_eos = self._flags.unbind(0)
        self.limit.fill_(1)
        """int64 [S + 1], prompt and output may not get longer: length stays below it."""
        self.draft_limit.fill_(num_draft_tokens)
        """Drafts from here on are not verified: SamplingParams.num_draft_tokens. A tree's parents come before
        their children, so what is left of it is a tree."""
        self.drafts = torch.full((rows, num_draft_tokens), -1, dtype=torch.int64, device=device)
        self.draft_parents: Tensor | None = torch.zeros_like(self.drafts) if tree is not None else None
        """int64 [S + 1, N], core/batch.Draft.parents; None where drafts are chains."""
        self.draft_probs: Tensor | None = None
        """float32 [S + 1, K, V], the q of sampled drafts; made when the first such draft is committed."""
        self.forced_lengths: Tensor | None = None
        """verify/forced_lossy.acceptance_table; set by timing runs alone, before a graph is captured."""
        self.eos_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        # A run of K + 1 tokens may be written behind the last valid position: the host drops those tokens.
        self.history = torch.zeros(rows, max_len + num_draft_tokens + 2, dtype=torch.int64, device=device)
        self.sampling = SamplingState(num_slots, vocab_size, eos_token_ids=eos_token_ids, device=device)
        self._dirty: set[int] = set()
        """Slots whose sampling row is not the cleared one."""

    @property
    def rows(self) -> StateRows:
        """What a step's outcome is entered into."""
        return StateRows(
            self.last_token,
            self.length,
            self.live,
            self.history,
            self.limit,
            self.stops_at_eos,
            self.eos_ids,
        )

    @property
    def source(self) -> Source:
        """What a step starts from."""
        return Source(
            self.last_token,
            self.length,
            self.live,
            self.drafts,
            self.draft_limit,
            self.page_table,
            self.sampling.temperature,
            self.sampling.seeds,
        )

    def keep_draft_probs(self) -> Tensor:
        """Allocate the rows of q once."""
        if self.draft_probs is None:
            shape = (self.num_slots + 1, self.num_draft_tokens, self.vocab_size)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return self.draft_probs

    def admit(self, requests: Sequence[Request]) -> None:
        """Fill the rows of newly admitted requests: known tokens, pages, no drafts, sampling parameters.

        One transfer and a handful of launches for all of them together, whatever their number.
        """
        rows, width = len(requests), self.history.shape[1]
        columns: list[int] = []
        flat: list[int] = []
        for request in requests:
            ids = request.token_ids
            columns += range(request.slot * width, request.slot * width + len(ids))
            flat += ids
        pages = self._page_columns([(r.slot, i, page) for r in requests for i, page in enumerate(r.pages)])
        parts: list[list[int]] = [
            [request.slot for request in requests],
            [(request.output_ids or request.prompt_ids)[-1] for request in requests],
            [request.num_tokens - 1 for request in requests],
            [request.max_total for request in requests],
            [self._limit(request) for request in requests],
            [1] * rows,
            [int(not request.params.ignore_eos) for request in requests],
            columns,
            flat,
            *pages,
        ]
        sizes = [7 * rows, 2 * len(flat), 2 * len(pages[0])]
        own, known, owned = torch.split(self.upload([list(chain.from_iterable(parts))])[0], sizes)
        values = own.view(7, rows)
        slots = values[0]
        self._numbers.index_copy_(1, slots, values[1:5])
        self._flags.index_copy_(1, slots, values[5:].bool())
        self.history.view(-1).index_copy_(0, *known.view(2, -1))
        # Not `drafts[...] = -1`: at CUDA indices torch copies the number from the host and waits for it.
        self.drafts.index_fill_(0, slots, -1)
        if self.draft_probs is not None:
            self.draft_probs.index_fill_(0, slots, 0.0)
        self._write_pages(owned.view(2, -1))
        for request in requests:
            self._set_sampling(request)

    def set_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Write (slot, index, page) entries of the page table in one transfer."""
        if entries:
            self._write_pages(self.upload(self._page_columns(entries)))

    def _page_columns(self, entries: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        """Places in the flat page table, and the pages that belong there."""
        width = self.page_table.shape[1]
        return [[slot * width + index for slot, index, _ in entries], [page for _, _, page in entries]]

    def _write_pages(self, columns: Tensor) -> None:
        """Write int64 [2, n] of `_page_columns`."""
        self.page_table.view(-1).index_copy_(0, columns[0], columns[1].to(torch.int32))

    def upload(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Integers of the host as int64 [len(rows), n] on the device, in one transfer, without waiting."""
        return self.pinned(rows).to(self.device, non_blocking=True)

    def pinned(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Integers as int64 on the host, in memory that a device copies from without waiting."""
        return torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _limit(self, request: Request) -> int:
        asked = request.params.num_draft_tokens
        return self.num_draft_tokens if asked is None else min(asked, self.num_draft_tokens)

    def _set_sampling(self, request: Request) -> None:
        # A greedy step reads no sampling row, but a greedy request may share a batch with sampled ones and
        # a slot's row may hold what its last owner wanted. Writing costs several launches, so plain greedy
        # requests only clear rows that need it.
        if request.needs:
            self.sampling.set_row(
                request.slot, request.params, num_prompt_tokens=len(request.prompt_ids), seed=request.seed
            )
            self._dirty.add(request.slot)
        elif request.slot in self._dirty:
            self.sampling.clear_row(request.slot)
            self._dirty.discard(request.slot)

"""Fused qkv rows, angles and a paged cache of random numbers, for tests of attention kernels."""

from dataclasses import dataclass, field, replace

import torch

from eyas.kernels import dispatch
from eyas.kernels.dispatch import use_backend
from eyas.kernels.reference.rows import chain_rows, tree_rows

PAGE = 16


@dataclass
class Problem:
    """Requests with `before` cached keys each and `rows` new rows each, ready for rotated_attention."""

    heads: int
    kv_heads: int
    head_dim: int
    before: list[int]
    rows: int
    dtype: torch.dtype
    device: str
    seed: int = 0
    spare_pages: int = 4
    qkv: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        requests = len(self.before)
        pages = -(-(max(self.before) + self.rows) // PAGE) + self.spare_pages
        total = requests * pages + 1
        order = torch.randperm(total - 1, generator=generator) + 1
        self.table = order.view(requests, pages).int().to(self.device)
        size = (total, PAGE, self.kv_heads, self.head_dim)
        self.keys, self.values = self._normal(generator, *size), self._normal(generator, *size)
        # Memory that nobody may read.
        self.keys[0], self.values[0] = float("nan"), float("nan")
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = self._normal(generator, requests, self.rows, width)

    def _normal(self, generator, *shape):
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)

    @property
    def start(self):
        return torch.tensor(self.before, device=self.device)

    def angles(self, positions):
        """cos, sin [T, dh / 2] of positions [T]."""
        pair = torch.arange(self.head_dim // 2, device=self.device)
        angle = positions[:, None] * 10000.0 ** (-2 * pair / self.head_dim)
        return angle.cos().float(), angle.sin().float()

    def chain(self, counts=None):
        """Fields of causal rows; rows past `counts` [B] are padding."""
        counts = self.start * 0 + self.rows if counts is None else torch.tensor(counts, device=self.device)
        return chain_rows(self.start, counts, self.table, self.rows, PAGE, 10**6)

    def tree(self, depths, bits):
        """Fields of tree rows, the same tree for every request."""
        each = torch.ones_like(self.start)[:, None]
        depths, bits = (each * torch.tensor(x, device=self.device) for x in (depths, bits))
        return tree_rows(self.start, depths, bits, self.table, 0, PAGE, 10**6)

    def only(self, request, rows, before=None):
        """The same problem for one request and some of its rows; `before` says what is cached by then."""
        part = replace(
            self, before=[self.before[request] if before is None else before], rows=rows.stop - rows.start
        )
        part.qkv, part.table = self.qkv[request : request + 1, rows], self.table[request : request + 1]
        part.keys, part.values = self.keys, self.values
        return part

    def attend(self, fields, backend="triton", **options):
        """(rows [B, R, H, dh], keys, values) after rotated_attention on copies of the caches."""
        keys, values = self.keys.clone(), self.values.clone()
        cos, sin = self.angles(fields.positions)
        if "max_visible" not in options:
            options["max_visible"] = int(fields.visible.max())
        with use_backend(backend), torch.no_grad():
            out = dispatch.rotated_attention(
                self.qkv.flatten(0, 1).contiguous(),
                cos,
                sin,
                keys,
                values,
                fields.slots,
                self.table,
                fields.q_start,
                fields.visible,
                num_heads=self.heads,
                scale=self.head_dim**-0.5,
                max_rows=self.rows,
                tree_bits=fields.tree_bits,
                **options,
            )
        return out.view(len(self.before), self.rows, self.heads, self.head_dim), keys, values

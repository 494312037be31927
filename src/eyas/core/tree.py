"""A draft as a tree of tokens below the last committed token; a chain is the tree with one branch.

Node 0 is the root, the last committed token. Drafted nodes are 1..N-1, parents before children.

Example, two candidates for the next token and one continuation of the first:

        root(0) -> "the"(1) -> "cat"(3)          parents = [-1, 0, 0, 1]
                -> "a"(2)                         depths  = [ 0, 1, 1, 2]

Ancestor mask (row sees column; every row sees itself and the root), packed bit j = column j:
    row 0: 1000 -> 1     row 1: 1100 -> 3     row 2: 1010 -> 5     row 3: 1101 -> 11

A `DraftTree` is one fixed shape. Dynamic trees are shaped by the drafter for each request in each step,
within a `TreeBudget`; their shapes live on the device (core/tree_rows).
"""

from dataclasses import dataclass
from functools import cached_property

from eyas.core.errors import ConfigError

MAX_ROWS = 63
"""Rows of a dynamic tree, root included: ancestor sets are bits of a non-negative int64."""


@dataclass(frozen=True)
class DraftTree:
    """Shape of a draft; `parents[i]` is the node above node i, -1 for the root."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.parents, "a tree has at least its root"
        assert self.parents[0] == -1, "node 0 is the root"
        for node, parent in enumerate(self.parents[1:], start=1):
            assert 0 <= parent < node, f"parent {parent} of node {node} must come before it"

    @classmethod
    def chain(cls, num_draft_tokens: int) -> "DraftTree":
        """Return K drafts, each the child of the one before; for K = 2 parents are (-1, 0, 1)."""
        return cls(tuple(range(-1, num_draft_tokens)))

    @property
    def num_nodes(self) -> int:
        """Rows that a verification takes, root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        depths.extend(0 for _ in self.parents[1:])
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Most drafts that one step can accept."""
        return max(self.depths)

    @property
    def num_scratch_rows(self) -> int:
        """Positions behind the newest token that the drafter may write to while it guesses."""
        return self.num_nodes - 1

    @cached_property
    def is_chain(self) -> bool:
        """Whether a causal mask is enough."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def ancestor_bits(self) -> tuple[int, ...]:
        """For each node, the set of nodes that it sees, as an integer with bit j for node j."""
        bits = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            bits.append(bits[parent] | (1 << node))
        return tuple(bits)


@dataclass(frozen=True)
class TreeBudget:
    """Bounds of the tree that a drafter grows anew for each request in each step.

    Example: TreeBudget(depth=5, top_k=4, num_draft_tokens=24) verifies 25 rows and accepts at most 5 drafts.
    """

    depth: int
    """Drafts on the longest path, as K of a chain."""
    top_k: int
    """Candidates below each node, and nodes that EAGLE-3 expands at each depth."""
    num_draft_tokens: int
    """N, drafted nodes (the root is not one)."""

    def __post_init__(self) -> None:
        if self.depth < 1 or self.top_k < 1:
            raise ConfigError(f"tree {self}: depth and top_k are at least 1")
        # Every candidate set holds top_k nodes at depth 1 and top_k for each expanded node further down.
        most = min(MAX_ROWS - 1, self.top_k + (self.depth - 1) * self.top_k**2)
        if not self.depth <= self.num_draft_tokens <= most:
            raise ConfigError(
                f"tree {self}: the number of nodes must be at least {self.depth}, the most likely path, and "
                f"at most {most}"
            )

    @classmethod
    def parse(cls, text: str) -> "TreeBudget":
        """Read "DEPTHxTOP_KxNODES": "5x4x24" is depth 5, top-k 4, 24 drafted nodes."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(
                f"tree {text!r}: write DEPTHxTOP_KxNODES, such as 5x4x24, or leave it out for a chain"
            )
        return cls(*(int(part) for part in parts))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.depth}x{self.top_k}x{self.num_draft_tokens}"

    @property
    def num_nodes(self) -> int:
        """Rows that a verification takes, root included."""
        return self.num_draft_tokens + 1

    @property
    def num_scratch_rows(self) -> int:
        """Positions behind the newest token that the drafter may write to: top_k a depth that is expanded."""
        return (self.depth - 1) * self.top_k

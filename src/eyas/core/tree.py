"""A draft as a tree of tokens below the last committed token; a chain is the tree with one branch.

Node 0 is the root, the last committed token. Drafted nodes are 1..N-1, parents before children.

Example, two candidates for the next token and one continuation of the first:

        root(0) -> "the"(1) -> "cat"(3)          parents = [-1, 0, 0, 1]
                -> "a"(2)                         depths  = [ 0, 1, 1, 2]

Ancestor mask (row sees column; every row sees itself and the root), packed bit j = column j:
    row 0: 1000 -> 1     row 1: 1100 -> 3     row 2: 1010 -> 5     row 3: 1101 -> 11
"""

from dataclasses import dataclass
from functools import cached_property


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

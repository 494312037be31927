"""What every way of guessing offers the engine.

The engine owns pages, requests and verification; a drafter owns a model (or none) and its layers of the
shared paged cache (same page table and slots as the target's). Two calls:

    prefill(committed)   known tokens: extend the drafter's own cache, guess nothing
    propose(committed)   after a verification: extend the cache by the accepted rows, guess K tokens

Both get `Committed` rows, shifted by one (core.capture). Inside them no value may be read back to the host
and shapes may depend on B, R, K only: on CUDA they stand in graphs. In `prefill` several B may be parts of
one request, one behind the other: all rows of a layer write K and V before any row attends. Random numbers,
where a drafter samples, come from the callable handed in, keyed by (seed, absolute position).
"""

from typing import Protocol, runtime_checkable

from eyas.core.batch import Committed, Draft, KVCache, KVLayout
from eyas.core.tree import DraftTree, TreeBudget


@runtime_checkable
class Drafter(Protocol):
    """One way of guessing. Attributes are fixed when the drafter is built."""

    name: str
    """As users write it: "eagle3", "peagle", "prompt_lookup", "small_model"."""
    aux_layers: tuple[int, ...]
    """Hidden states it reads, entering-layer ids; () if none."""
    kv_layout: KVLayout | None
    """What it caches per token; None for nothing."""

    @property
    def tree(self) -> DraftTree | TreeBudget:
        """Shape of every draft, DraftTree.chain(K), K = num_draft_tokens; or a budget for trees.

        Within a budget `propose` shapes each tree (`Draft.parents`). Committed has tree.depth + 1 rows.
        """
        ...

    @property
    def num_draft_tokens(self) -> int:
        """K; for trees the number of drafted nodes."""
        ...

    def bind(self, cache: KVCache | None, max_visible: int) -> None:
        """Receive the cache that kv_layout asked for, and the engine's context limit."""
        ...

    def prefill(self, committed: Committed) -> None:
        """Extend the cache by rows whose next tokens are all known (prompt chunks)."""
        ...

    def propose(self, committed: Committed) -> Draft:
        """Extend the cache by the accepted rows and guess K tokens after the newest one.

        With `committed.num_guesses` so many instead, 1 at least; trees keep their shape.
        """
        ...


def reads_history(drafter: Drafter | None) -> bool:
    """Whether `propose` reads `Committed.history`; a drafter that has no say in it (`reads_history`) does."""
    return drafter is not None and bool(getattr(drafter, "reads_history", True))

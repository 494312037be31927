"""The ways of decoding one target that a server offers: plain, or with one head or another.

Each is an LLM with KV pages of its own over the same weights. One thread drives them all, a step of one at a
time: whichever has work and has had the least time so far goes next. Two that run side by side thus get half
of the machine each, and their speeds compare as they would alone (the page's race relies on that).

Example, steps of A take 2 ms and of B 1 ms, both busy: A B B A B B ...
"""

import time
from collections.abc import Mapping

from eyas.core.tree import TreeBudget
from eyas.engine.llm import LLM

PLAIN = "plain"


class Methods:
    """LLMs by name; the first is the default.

    Args:
        llms: over one target, with the same context limit.
    """

    def __init__(self, llms: Mapping[str, LLM]) -> None:
        self.llms = dict(llms)
        self.default = next(iter(self.llms))
        self._busy: set[str] = set()
        self._spent = dict.fromkeys(self.llms, 0.0)

    @classmethod
    def of(cls, llms: "LLM | list[LLM] | Methods") -> "Methods":
        """Name each by its drafter: plain, eagle3, peagle, and eagle3-2 for a second one of a kind."""
        if isinstance(llms, Methods):
            return llms
        named: dict[str, LLM] = {}
        for llm in llms if isinstance(llms, list) else [llms]:
            base = PLAIN if llm.drafter is None else llm.drafter.name
            name, count = base, 1
            while name in named:
                count += 1
                name = f"{base}-{count}"
            named[name] = llm
        return cls(named)

    @property
    def llm(self) -> LLM:
        """The default one."""
        return self.llms[self.default]

    @property
    def max_num_seqs(self) -> int:
        """Completions that run at once in all of them together."""
        return sum(llm.max_num_seqs for llm in self.llms.values())

    @property
    def num_decode_steps(self) -> int:
        """Target forwards of all of them."""
        return sum(llm.stats.steps for llm in self.llms.values())

    def wake(self, name: str) -> None:
        """Say that a method has got work."""
        if name in self._busy:
            return
        # Time not used while idle is not owed later.
        if self._busy:
            self._spent[name] = max(self._spent[name], min(self._spent[other] for other in self._busy))
        self._busy.add(name)

    def step(self) -> bool:
        """One step of the method that is due; without work one of each, which does nothing.

        Returns whether any has work left.
        """
        if not self._busy:
            for llm in self.llms.values():
                llm.step()
            return False
        name = min(self._busy, key=self._spent.__getitem__)
        begin = time.perf_counter()
        try:
            if not self.llms[name].step():
                self._busy.discard(name)
        finally:
            self._spent[name] += time.perf_counter() - begin
        return bool(self._busy)


def share_of_rest(fraction: float, number: int, total: int) -> float:
    """Share of the memory still free that engine `number` of `total` may take.

    Each then gets the same part of `fraction` of what was free at first: 0.8 for two is 0.4 of all, and for
    the second 0.4 of the 0.6 left.
    """
    part = fraction / total
    return part / (1 - number * part)


def shape_of(llm: LLM) -> str | None:
    """The tree that an LLM drafts, as `--tree` reads it; None for chains."""
    tree = None if llm.drafter is None else llm.drafter.tree
    return str(tree) if isinstance(tree, TreeBudget) else None

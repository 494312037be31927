"""A step on made-up requests: state rows and caches filled directly, so that any batch is ready at once.

Every request has `context` cached tokens (random keys and values in shuffled pages) and the drafts that a
real step left. `restore` puts all of it back, so that each timed round runs the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.bench.step_clock import Call
from eyas.core.batch import KVCache, KVLayout
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.engine.graphs import bucket_of, visible_bound
from eyas.engine.kv_cache import CPU_PAGE_SIZE, CUDA_PAGE_SIZE, CacheSizes, allocate
from eyas.engine.sampler import Needs, greedy_choices
from eyas.engine.state import EngineState
from eyas.engine.step import StepModels, Variant, accept, commit, expand, propose, verify, whole
from eyas.targets.base import Target
from eyas.verify.forced_lossy import acceptance_table

PHASES = ("verify", "accept", "expand", "draft", "commit")


@dataclass(slots=True)
class StepRig:
    """What a step runs on; `slots` is padded to the engine's batch bucket."""

    models: StepModels
    state: EngineState
    slots: Tensor
    variant: Variant
    saved: dict[str, Tensor]
    hidden: Tensor
    """[B, R, D], of a verification"""

    def restore(self) -> None:
        """Put the state rows back."""
        for name, values in self.saved.items():
            getattr(self.state, name).copy_(values)

    def warm(self) -> None:
        """Two steps, off the default stream as capture wants it: kernels are compiled."""
        _beside(self.state.device, lambda: [self.step() for _ in range(2)])

    @torch.no_grad()
    def step(self) -> None:
        """All five phases."""
        whole(self.models, self.state, self.slots, self.variant)

    @torch.no_grad()
    def logits(self) -> None:
        """What `accept` asks of the target: the likeliest token at every row."""
        greedy_choices(self.models.decoder, self.hidden)

    def phases(self) -> list[Call]:
        """One call for each of PHASES, to be run in order; each reads what those before it left."""
        held: dict[str, Any] = {}
        models, state, slots, variant = self.models, self.state, self.slots, self.variant

        def run_verify() -> None:
            held["verified"] = verify(models, state, slots, variant)

        def run_accept() -> None:
            held["accepted"], held["report"] = accept(models, state, slots, held["verified"], variant)

        def run_expand() -> None:
            held["committed"] = expand(models, state, slots, held["verified"], held["accepted"], variant)

        def run_draft() -> None:
            held["draft"] = propose(models, held["committed"])

        def run_commit() -> None:
            commit(state, slots, held["draft"])

        calls = (run_verify, run_accept, run_expand, run_draft, run_commit)
        return [torch.no_grad()(call) for call in calls]


@torch.no_grad()
def make_rig(
    target: Target,
    drafter: Drafter | None,
    *,
    batch: int,
    context: int,
    acceptance: float | None = None,
    seed: int = 0,
) -> StepRig:
    """A rig of `batch` greedy requests. The drafter is bound to a cache of the rig's own.

    Raises ConfigError where the target's context is too short, or `acceptance` (mean tokens a step, forced)
    cannot be.
    """
    device, config = target.device, target.config
    num_drafts = 0 if drafter is None else drafter.num_draft_tokens
    depth = 0 if drafter is None else drafter.tree.depth
    scratch = 0 if drafter is None else drafter.tree.num_scratch_rows
    page_size = CUDA_PAGE_SIZE if device.type == "cuda" else CPU_PAGE_SIZE
    # Twice, because the first steps run before the state is put back.
    max_len = context + 2 * (num_drafts + depth + scratch + 4)
    if max_len > config.max_position_embeddings:
        raise ConfigError(
            f"context={context}: with {num_drafts} drafts the target must hold {max_len} positions, and it "
            f"has {config.max_position_embeddings}"
        )
    generator = torch.Generator(device).manual_seed(seed)
    pages = -(-max_len // page_size)
    sizes = CacheSizes(batch * pages + 1, page_size)

    def cache(layout: KVLayout) -> KVCache:
        made = allocate(layout, sizes, dtype=target.dtype, device=device)
        for tensor in (*made.keys, *made.values):
            tensor.normal_(generator=generator)
        return made

    tree = None if drafter is None or not isinstance(drafter.tree, TreeBudget) else drafter.tree
    state = EngineState(
        batch,
        num_draft_tokens=num_drafts,
        tree=tree,
        max_len=max_len,
        page_size=page_size,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        device=device,
    )
    if drafter is not None:
        drafter.bind(None if drafter.kv_layout is None else cache(drafter.kv_layout), max_len)
    models = StepModels(target.decoder, cache(target.decoder.kv_layout), drafter)
    if acceptance is not None and depth:
        state.forced_lengths = acceptance_table(acceptance, depth, device=device)
    order = torch.randperm(batch * pages, generator=generator, device=device) + 1
    state.page_table[:batch] = order.view(batch, pages).to(torch.int32)
    state.history.copy_(
        torch.randint(config.vocab_size, state.history.shape, generator=generator, device=device)
    )
    state.last_token[:batch] = state.history[:batch, context]
    state.length[:batch] = context
    state.limit[:batch] = max_len
    state.live[:batch] = True
    slots = torch.full((bucket_of(batch),), batch, dtype=torch.int64, device=device)
    slots[:batch] = torch.arange(batch, device=device)
    variant = Variant(Needs.GREEDY, visible_bound(min(context + num_drafts + 1, max_len)), num_drafts)
    hidden = torch.empty(
        slots.shape[0], num_drafts + 1, config.hidden_size, device=device, dtype=target.dtype
    )
    rig = StepRig(models, state, slots, variant, {}, hidden.normal_(generator=generator))
    # The second of these steps verifies what the first one drafted.
    rig.warm()
    state.length[:batch] = context
    rig.saved = {name: value.clone() for name, value in _tensors(state).items()}
    return rig


def _tensors(state: EngineState) -> dict[str, Tensor]:
    """The state rows that a step changes."""
    names = ("last_token", "length", "live", "drafts", "draft_parents", "history")
    return {name: value for name in names if (value := getattr(state, name)) is not None}


def _beside(device: torch.device, call: Callable[[], Any]) -> None:
    """Run `call` on a stream of its own and wait for it."""
    if device.type != "cuda":
        call()
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)

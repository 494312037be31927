"""As kernels/dispatch, for what stands between the forwards of a speculative step."""

from torch import Tensor

from eyas.kernels.dispatch import _twin
from eyas.kernels.reference import step_force as _force
from eyas.kernels.reference import step_settle as _settle
from eyas.kernels.reference.step_settle import StateRows


def force(
    choices: Tensor, drafts: Tensor, start: Tensor, slots: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_force.force."""
    out: tuple[Tensor, Tensor] = _twin(_force, choices).force(choices, drafts, start, slots, table)
    return out


def settle(
    tokens: Tensor,
    counts: Tensor | None,
    bad_rows: Tensor,
    drafts: Tensor,
    slots: Tensor,
    start: Tensor,
    rows: StateRows,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_settle.settle."""
    out: tuple[Tensor, Tensor] = _twin(_settle, tokens).settle(
        tokens, counts, bad_rows, drafts, slots, start, rows
    )
    return out

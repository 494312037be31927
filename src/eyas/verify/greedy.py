"""Accept the drafts that are what the target chooses anyway.

`choices[b, i]` is the target's choice after the first i drafts: the argmax, or one draw from its
distribution p keyed by (seed, position). As long as the drafts before it equal the choices, a row's choice
is exactly what plain decoding would have committed there, so committing the choices up to the first
difference commits what plain decoding commits: at temperature 0 and, with the same keyed random numbers,
at any temperature. For point-mass drafts (argmax, lookups) this is also as good as the rejection rule:
the draft x is accepted with probability p(x), and a rejected row's choice is distributed as p without x
(Leviathan et al. 2023, appendix A, with q a point mass).
"""

from torch import Tensor

from eyas.kernels.reference.step_settle import count_matches
from eyas.verify.accepted import Accepted


def accept_by_match(choices: Tensor, drafts: Tensor) -> Accepted:
    """Commit choices up to and including the first that differs from its draft.

    The engine's `settle` does this and what follows from it in one kernel.

    Example, K = 3:
        choices [[5, 9, 4, 7]]   drafts [[5, 8, 4]]   ->   tokens [[5, 9, 4, 7]]   counts [2]

    Args:
        choices: int64 [B, K + 1].
        drafts: int64 [B, K]; -1 for no draft, which nothing equals. K may be 0.

    Returns:
        Accepted; its tokens are the choices themselves, since accepted drafts equal them.
    """
    return Accepted(choices, count_matches(choices, drafts))

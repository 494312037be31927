"""What one speculative step must read and compute at the least: the target once, the drafter as it works.

verify    every layer of the target, for K + 1 rows (N + 1 nodes of a tree) a request
accept    the target's lm_head for the same rows
draft     EAGLE-3: the accepted rows through fc and its layer, then the layer and its lm_head again for each
          further depth. P-EAGLE: the accepted rows and the mask rows once through every layer, lm_head once.

Rows that were rejected are not counted: a step that leaves them out would do.
"""

from eyas.bench.floor import LayerShape, Work, layer, matrix
from eyas.core.model_config import TargetConfig
from eyas.core.tree import DraftTree, TreeBudget
from eyas.drafters.head_config import HeadConfig


def target_work(
    config: TargetConfig, *, num_requests: int, rows: int, context: int, itemsize: int
) -> list[Work]:
    """The target's layers for `rows` rows a request."""
    shape = _shape(config, config.hidden_size)
    work: list[Work] = []
    for index in range(config.num_layers):
        window = config.windows[index] if config.windows else None
        work += layer(num_requests, rows, min(context, window or context), shape, itemsize)
    return work


def logits_work(config: TargetConfig, *, num_requests: int, rows: int, itemsize: int) -> Work:
    """The target's lm_head for `rows` rows a request."""
    return matrix(num_requests * rows, config.vocab_size, config.hidden_size, itemsize)


def draft_work(
    config: HeadConfig,
    tree: DraftTree | TreeBudget,
    *,
    num_requests: int,
    accepted: float,
    context: int,
    itemsize: int,
) -> list[Work]:
    """A head's part of a step in which a request committed `accepted` tokens on average."""
    width = tree.top_k if isinstance(tree, TreeBudget) else 1
    fc = matrix(num_requests * accepted, config.hidden_size, config.feature_size, itemsize)
    if config.kind == "peagle":
        rows = accepted + tree.depth - 1
        guesses = num_requests * tree.depth
        return [
            fc,
            *_layers(config, num_requests, rows, context, itemsize),
            matrix(guesses, config.draft_vocab_size, config.hidden_size, itemsize),
        ]
    work = [fc]
    for depth in range(tree.depth):
        rows = width if depth else accepted
        guesses = num_requests * (width if depth else 1)
        work += _layers(config, num_requests, rows, context, itemsize)
        work.append(matrix(guesses, config.draft_vocab_size, config.hidden_size, itemsize))
    return work


def _layers(config: HeadConfig, num_requests: int, rows: float, context: int, itemsize: int) -> list[Work]:
    work: list[Work] = []
    for index in range(config.num_layers):
        window = config.windows[index] if config.windows else None
        shape = _shape(config, config.hidden_size * (1 if index else 2))
        work += layer(num_requests, rows, min(context, window or context), shape, itemsize)
    return work


def _shape(config: TargetConfig | HeadConfig, input_size: int) -> LayerShape:
    return LayerShape(
        input_size=input_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )

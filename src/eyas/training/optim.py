"""AdamW, its learning rate over a run, and the moving average of the weights."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eyas.training.config import OptimSection


def make_optimizer(parameters: list[nn.Parameter], config: OptimSection) -> torch.optim.AdamW:
    """AdamW over float32 weights; one fused kernel on CUDA."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=parameters[0].is_cuda,
    )


def learning_rate(progress: float, config: OptimSection) -> float:
    """Rate at `progress` of the run in [0, 1]: linear rise over `warmup`, then decay to lr * final_lr.

    lr 1, warmup 0.1, linear to 0: progress 0.05 -> 0.5, 0.1 -> 1, 0.55 -> 0.5, 1 -> 0.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    after = (progress - config.warmup) / (1.0 - config.warmup)
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "linear":
        share = 1.0 - after
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * after))
    return config.lr * (config.final_lr + (1.0 - config.final_lr) * share)


class MovingAverage:
    """Exponential moving average of weights; early on it averages over the steps there were.

    `parameters` are what the optimizer changes in place: this process's parts of them, where they are shared
    out.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.shadow = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimizer step s (from 1): shadow += (1 - d) (weights - shadow), d = min(decay, s/(s+10))."""
        decay = min(self.decay, step / (step + 10.0))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.parameters], 1.0 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages; call twice to go back."""
        for parameter, shadow in zip(self.parameters, self.shadow, strict=True):
            kept: Tensor = parameter.detach().clone()
            parameter.copy_(shadow)
            shadow.copy_(kept)

import math

import pytest
import torch
from torch import nn

from eyas.training.config import OptimSection
from eyas.training.optim import MovingAverage, learning_rate


@pytest.mark.parametrize(
    ("schedule", "progress", "expected"),
    [
        ("linear", 0.05, 0.5),
        ("linear", 0.1, 1.0),
        ("linear", 0.55, 0.5 + 0.5 * 0.2),
        ("linear", 1.0, 0.2),
        ("linear", 7.0, 0.2),
        ("cosine", 0.55, 0.2 + 0.8 * 0.5),
        ("cosine", 1.0, 0.2),
        ("constant", 0.9, 1.0),
    ],
)
def test_learning_rate(schedule, progress, expected):
    config = OptimSection(lr=1.0, warmup=0.1, schedule=schedule, final_lr=0.2)
    assert math.isclose(learning_rate(progress, config), expected, rel_tol=1e-12)


def test_moving_average_and_its_swap():
    weight = nn.Parameter(torch.zeros(3))
    average = MovingAverage([weight], 0.9)
    shadow = 0.0
    for step in range(1, 30):
        with torch.no_grad():
            weight.fill_(float(step))
        average.update(step)
        shadow += (1 - min(0.9, step / (step + 10))) * (step - shadow)
    assert average.shadow[0][0].item() == pytest.approx(shadow, rel=1e-5)
    average.swap()
    assert weight[0].item() == pytest.approx(shadow, rel=1e-5)
    average.swap()
    assert weight[0].item() == 29.0

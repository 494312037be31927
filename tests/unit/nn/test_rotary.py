"""Rotary angles and rotation against complex numbers; norm against its formula."""

import math

import pytest
import torch

from eyas.core.model_config import RopeConfig
from eyas.kernels.reference.norm import rms_norm
from eyas.kernels.reference.rotary import apply_rope
from eyas.nn.rotary import Rotary, inverse_frequencies


def test_rotation_is_multiplication_of_complex_numbers():
    rotary = Rotary(RopeConfig(theta=100.0), 8, 50)
    positions = torch.tensor([[0, 3, 49], [7, 7, 1]])
    x = torch.randn(2, 3, 5, 8)
    out = apply_rope(x, *rotary(positions))
    for i in range(4):
        angle = positions.double() * 100.0 ** (-2 * i / 8)
        turned = (
            torch.complex(x[..., i], x[..., i + 4]) * torch.polar(torch.ones_like(angle), angle)[..., None]
        )
        assert torch.allclose(out[..., i].double(), turned.real, atol=1e-5)
        assert torch.allclose(out[..., i + 4].double(), turned.imag, atol=1e-5)


def test_only_distances_matter():
    """Scores of rotated q and k depend on the difference of positions, not on the positions."""
    rotary = Rotary(RopeConfig(), 16, 200)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(i, j):
        at = [apply_rope(x, *rotary(torch.tensor([p]))) for x, p in ((q, i), (k, j))]
        return float((at[0] * at[1]).sum())

    assert score(5, 2) == pytest.approx(score(155, 152), abs=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 1e-3


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies(factor):
    """Loop over the rule's words: short wavelengths stay, long ones are divided, between is blended."""
    rope = RopeConfig(
        theta=5e5,
        kind="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    kinds = set()
    for i, got in enumerate(inverse_frequencies(rope, 128).tolist()):
        plain = 5e5 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            kind, want = "short", plain
        elif wavelength > 8192:
            kind, want = "long", plain / factor
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            kind, want = "between", (1 - smooth) * plain / factor + smooth * plain
        kinds.add(kind)
        assert got == pytest.approx(want, rel=1e-5)
    assert kinds == {"short", "long", "between"}


def test_angles_stay_float32_when_weights_are_cast():
    rotary = Rotary(RopeConfig(), 8, 4000)
    before = rotary.cos.clone()
    rotary.to(torch.bfloat16)
    assert rotary.cos.dtype == torch.float32
    assert torch.equal(rotary.cos, before)


def test_positions_past_the_table_do_not_fail():
    rotary = Rotary(RopeConfig(), 8, 10)
    cos, _ = rotary(torch.tensor([9, 10, 1000]))
    assert torch.equal(cos[1], cos[0])


def test_rms_norm():
    x, weight = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    for row in range(3):
        mean = sum(float(v) ** 2 for v in x[row]) / 7
        want = x[row] / math.sqrt(mean + 1e-3) * weight
        assert torch.allclose(rms_norm(x, weight, 1e-3)[row], want, atol=1e-12)

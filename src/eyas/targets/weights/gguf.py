"""Tensors of a GGUF file under Hugging Face names, decoded to float32.

For the Llama family, GGUF stores q and k so that rotation pairs neighbours (row 2i with 2i + 1 of a head);
ours pairs halves (row i with i + head_dim / 2). `unpermute` puts the rows back.
"""

import torch
from torch import Tensor

from eyas.core.errors import ModelFormatError
from eyas.core.model_config import TargetConfig
from eyas.targets.families import FAMILIES, gguf_name
from eyas.targets.weights.gguf_file import GGUFFile


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Interleaved to half-split rows of q or k: weight [heads * dh, D] or bias [heads * dh].

    One head of 6 rows: stored 0 3 1 4 2 5 (that is, pairs (0, 3), (1, 4), (2, 5)) -> 0 1 2 3 4 5.
    """
    per_head = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return per_head.transpose(1, 2).reshape(rows.shape)


class GGUFTensors:
    """Looks up tensors of a GGUF file by Hugging Face name, like weights.safetensors.SafetensorsFolder."""

    def __init__(self, file: GGUFFile, config: TargetConfig) -> None:
        self.file, self.config = file, config

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name` in float32; ModelFormatError if it is missing or has another shape."""
        stored = gguf_name(name)
        info = self.file.tensors.get(stored)
        if info is not None and info.shape != shape:
            raise ModelFormatError(
                f"{self.file.path}: tensor {stored} has shape {list(info.shape)}, "
                f"but the metadata asks for {list(shape)}"
            )
        tensor = torch.from_numpy(self.file.read(stored).copy())
        if FAMILIES[self.config.family].gguf_permuted:
            if ".q_proj." in name:
                return unpermute(tensor, self.config.num_heads)
            if ".k_proj." in name:
                return unpermute(tensor, self.config.num_kv_heads)
        return tensor

"""Writes tiny Hugging Face folders. For tests only."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from eyas.targets.families import hf_shapes
from eyas.targets.hf_config import config_to_hf


def random_state(config, seed=0):
    """Hugging Face state dict of random float32 numpy arrays."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in hf_shapes(config).items()
    }


def write_folder(folder, config, state, dtype=torch.float32):
    """A Hugging Face folder without a tokenizer."""
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.from_numpy(value).to(dtype) for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, "float32")))
    return folder

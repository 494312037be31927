"""What the papers trained with, by name: `preset: eagle3.1` in a recipe, or `eyas train --preset eagle3.1`.

A preset lies beneath the recipe: whatever the recipe or the command line says wins. All that a recipe must
add is target.path, data.store and run.out. Where a source leaves a value open, the comment says what fills
it.
"""

from typing import Any

_EAGLE3: dict[str, Any] = {
    # EAGLE-3 (arXiv 2503.01840) and its authors' training code.
    "data": {"seq_len": 2048},
    "head": {
        "num_layers": 1,
        "draft_vocab_size": 32000,
        "train_embeddings": "none",
        "init_lm_head_from_target": False,
    },
    "objective": {"kind": "eagle3", "ttt_steps": 7, "decay": 0.8},
    "loss": {"kind": "soft_ce", "oov": "mask"},
    "optim": {
        "lr": 5e-5,
        "betas": [0.9, 0.95],
        "weight_decay": 0.0,
        "clip": 0.5,
        "warmup": 0.015,  # 12,000 of 800,000 steps
        "schedule": "linear",
        "final_lr": 0.0,
    },
    # One sequence a forward, two a step; rows here are packed, so a step sees somewhat more tokens.
    "run": {"batch_rows": 1, "accumulation": 2, "epochs": 40},
}

_PEAGLE: dict[str, Any] = {
    # P-EAGLE (arXiv 2602.01469).
    "data": {"seq_len": 8192},
    "head": {
        "num_layers": 4,
        "draft_vocab_size": 32000,  # not said; EAGLE-3's
        "train_embeddings": "all",
        "init_lm_head_from_target": False,
    },
    "objective": {"kind": "peagle", "num_depths": 8, "retention": 0.8, "min_retention": 0.0},
    # Cross-entropy over all slots, no weights by depth; soft and without masking as in the open ports.
    "loss": {"kind": "soft_ce", "oov": "keep"},
    "optim": {
        "lr": 1e-4,
        "betas": [0.9, 0.95],  # not said; EAGLE-3's
        "weight_decay": 0.0,
        "clip": 1.0,  # not said; the open ports'
        "warmup": 0.0025,
        "schedule": "linear",
        "final_lr": 0.0,
    },
    "run": {"batch_rows": 1, "accumulation": 8, "epochs": 60},
}

PRESETS: dict[str, dict[str, Any]] = {
    "eagle3-paper": _EAGLE3,
    # The same training; one RMSNorm for each captured state, and the normed output is fed back.
    "eagle3.1": _EAGLE3 | {"head": _EAGLE3["head"] | {"fc_norm": True, "norm_output": True}},
    "peagle-paper": _PEAGLE,
}

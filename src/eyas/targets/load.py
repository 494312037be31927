"""Loads a target: a Hugging Face folder, a GGUF file, a hub name or a name of targets.fetch.

Only safetensors, GGUF and JSON are read; nothing is ever unpickled. Weights are mapped, not copied, where
the file's dtype is the wanted one and the device is the CPU (q, k, v and gate, up are stacked, which
copies).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.core.errors import ConfigError, ModelFormatError
from eyas.core.model_config import TargetConfig, TargetIdentity
from eyas.targets.base import Target
from eyas.targets.decoder import Decoder
from eyas.targets.families import hf_parts, hf_shapes
from eyas.targets.fetch import MODELS, get_model, hub_folder
from eyas.targets.hf_config import config_from_hf, read_json
from eyas.targets.identity import fingerprint
from eyas.targets.weights.safetensors import PICKLES, SafetensorsFolder

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SOURCE = "eyas_source.json"


def load_target(
    path_or_name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    tokenizer: bool = True,
    pack: bool = True,
) -> Target:
    """The target at a path or under a name, frozen, in `dtype` (float32 on CPU, bfloat16 on CUDA by default).

    `pack` keeps a second, blocked copy of float32 weights on the CPU: decoding is about twice as fast,
    memory too. Raises ModelFormatError, naming file and tensor, for whatever cannot be read as a supported
    model, ConfigError for a device that is not there or another dtype.
    """
    if not isinstance(path_or_name, str | Path):
        raise ConfigError(f"{path_or_name!r} names no target: give a folder, a GGUF file or a name")
    device = check_device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not supported; use {', '.join(map(str, DTYPES))}")
    path = find(path_or_name)
    folder = path if path.is_dir() else _converted(path, dtype)
    config = read_config(folder)
    decoder = _build(config, SafetensorsFolder(folder), dtype, device)
    identity = TargetIdentity(_name(folder, path_or_name), fingerprint(decoder))
    if pack and device.type == "cpu":
        decoder.pack()
    return Target(decoder, config, load_tokenizer(folder) if tokenizer else None, identity, path)


def find(path_or_name: str | Path) -> Path:
    """The model folder or GGUF file meant by a path, a hub name ("org/model") or a name of targets.fetch."""
    if not str(path_or_name):
        raise ConfigError("no target is named: give a folder, a GGUF file or a name")
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and len(files := sorted(path.glob("*.gguf"))) == 1:
            return files[0]
        return path
    if path.is_file():
        if any(path.match(pattern) for pattern in PICKLES):
            raise ModelFormatError(
                f"{path}: pickled weights can run code when they are opened, so they are never read; "
                "use safetensors or GGUF"
            )
        if path.suffix != ".gguf":
            raise ModelFormatError(f"{path}: give a .gguf file or the folder that holds config.json")
        return path
    name = str(path_or_name)
    if name.lower() in MODELS:
        return get_model(name.lower())
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return hub_folder(name)
    raise ModelFormatError(
        f"{name}: no such file or folder, and not a name that can be fetched "
        f"({', '.join(MODELS)}, or org/model)"
    )


def read_config(folder: Path) -> TargetConfig:
    """TargetConfig of a Hugging Face folder."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    return config_from_hf(read_json(path), path, read_json(generation) if generation.is_file() else None)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, with its chat template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # A model's own class may put its pre-tokenizer in place of the file's; a converted copy's file is right.
    cls = PreTrainedTokenizerFast if (folder / _SOURCE).is_file() else AutoTokenizer
    try:
        return cls.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - damaged files raise errors of any kind in there
        first = next(iter(str(error).strip().splitlines()), "")
        raise ModelFormatError(
            f"{folder}: the tokenizer cannot be loaded ({type(error).__name__}: {first}). "
            "Check tokenizer.json, tokenizer_config.json and config.json"
        ) from None


def check_device(name: torch.device | str) -> torch.device:
    """The CPU or a CUDA device that is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {str(name)!r} is unknown; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(name)!r} is not supported; use cpu, cuda or cuda:N")
    count = 1 if device.type == "cpu" else torch.cuda.device_count()
    if (device.index or 0) >= count:
        have = "there is one CPU device" if device.type == "cpu" else f"torch sees {count} CUDA devices"
        raise ConfigError(f"device {str(name)!r} is not there: {have}")
    return device


def _converted(path: Path, dtype: torch.dtype) -> Path:
    """The converted copy of a GGUF file."""
    from eyas.targets.gguf_tokenizer import write_tokenizer
    from eyas.targets.weights.convert import converted

    return converted(path, dtype, write_tokenizer)


def _name(folder: Path, given: str | Path) -> str:
    """What users call the model: the GGUF file's stem, the hub name, or the folder's name."""
    if (source := folder / _SOURCE).is_file():
        return str(read_json(source).get("name", folder.name))
    return str(given) if not Path(given).expanduser().exists() else folder.resolve().name


def _build(
    config: TargetConfig, source: SafetensorsFolder, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """A frozen decoder that holds the source's tensors."""
    with torch.device("meta"):
        decoder = Decoder(config)
    shapes = hf_shapes(config)

    def tensor(name: str) -> Tensor:
        # Each part moves by itself, so a device never holds more than one spare tensor.
        parts = [source.get(part, shapes[part]).to(device, dtype) for part in hf_parts(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    state = {name: tensor(name) for name in decoder.state_dict()}
    decoder.load_state_dict(state, strict=True, assign=True)
    decoder.rotary.to(device)
    return decoder.eval().requires_grad_(requires_grad=False)

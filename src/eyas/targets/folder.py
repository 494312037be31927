"""A target as a Hugging Face folder, for programs that read nothing else."""

import shutil
from pathlib import Path

import torch

from eyas.core.errors import ConfigError, ModelFormatError
from eyas.targets.gguf_tokenizer import write_tokenizer
from eyas.targets.load import find
from eyas.targets.weights.convert import converted


def hf_folder(path_or_name: str | Path, dtype: torch.dtype) -> Path | None:
    """Folder of a target whose weights are in a GGUF file, converted to `dtype`; None for any other target.

    A hub name ("org/model") is not looked up.
    """
    name = str(path_or_name)
    if not Path(name).expanduser().exists() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return None
    path = find(path_or_name)
    return None if path.is_dir() else converted(path, dtype, write_tokenizer)


def export_folder(path_or_name: str | Path, out_dir: str | Path, dtype: torch.dtype) -> Path:
    """Write config.json, safetensors and tokenizer of a GGUF target to a new folder `out_dir`.

    ConfigError for a target that is a folder already, or where out_dir holds something.
    """
    source, out = hf_folder(path_or_name, dtype), Path(out_dir)
    if source is None:
        raise ConfigError(f"{path_or_name} is a Hugging Face model already; use it as it is")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there and not an empty folder; choose another")
    partial = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        if out.exists():
            out.rmdir()
        partial.replace(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelFormatError(f"{out}: the folder cannot be written ({error})") from None
    return out

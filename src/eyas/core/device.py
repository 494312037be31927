"""What a device is called where measurements are kept."""

import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def cpu_name() -> str:
    """Return the processor's model name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: "torch.device") -> str:
    """Return the GPU's name, or the processor's."""
    if device.type != "cuda":
        return cpu_name()
    import torch

    return torch.cuda.get_device_name(device)

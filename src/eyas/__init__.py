"""Eyas: train EAGLE-3 and P-EAGLE draft heads, prove that they change nothing but the speed, run them.

`import eyas` is light: torch is imported when a name that needs it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.core.outputs import CompletionOutput, RequestOutput
    from eyas.core.sampling import SamplingParams
    from eyas.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "eyas.engine.llm",
    "CompletionOutput": "eyas.core.outputs",
    "RequestOutput": "eyas.core.outputs",
    "SamplingParams": "eyas.core.sampling",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home the first time it is used (PEP 562)."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")

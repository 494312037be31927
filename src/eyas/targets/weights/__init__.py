"""Readers of weight files: safetensors and GGUF. Nothing is ever unpickled."""

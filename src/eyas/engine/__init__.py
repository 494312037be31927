"""The engine: paged KV caches, continuous batching, the speculative step, sampling, text.

Read `step` first, then `scheduler`, `runner` and `llm`.
"""

"""From prompts to training rows: sources, chat template, regeneration, token store, packing, capture.

    chat template --prompts--> prompts.jsonl, where the target writes them itself
    prompts.jsonl --regenerate--> shards of the target's own answers --store--> token store
    token store --loader--> packed rows on the device --capture--> features and teacher of the frozen target

The generator that answers prompts is a callable handed in by the caller; nothing here imports the engine.
"""

"""Training of draft heads: one trainer, an objective per kind of head.

rows (the shift by one) -> objective (slots and the drafter's forward) -> losses -> optim; checkpoint, metrics
and display stand beside. Evaluation by real decoding is a callable that is handed in.
"""

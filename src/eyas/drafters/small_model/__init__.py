"""A separate small model of the same vocabulary as drafter (speculative sampling)."""

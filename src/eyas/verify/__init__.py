"""Which drafts are kept: pure functions of target outputs, drafts and keyed random numbers."""

"""Ways of guessing tokens, one folder each: config and model where they have one, and `propose`."""

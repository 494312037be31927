"""EAGLE-3: a one-layer head that reads the target's hidden states and feeds its own output back."""

"""P-EAGLE: an EAGLE-3 head that guesses K tokens in one forward."""

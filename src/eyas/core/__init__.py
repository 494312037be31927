"""Values that every other package shares, without behaviour of their own. Imports nothing of ours."""

"""Heads for other engines: names, flags and conventions of each, and a check of what was written."""

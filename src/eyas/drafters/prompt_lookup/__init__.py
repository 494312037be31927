"""Prompt lookup: repeat what followed the last few tokens earlier in the text."""

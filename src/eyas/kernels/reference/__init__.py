"""Slow, obvious PyTorch twins of every kernel; what they compute is the definition."""

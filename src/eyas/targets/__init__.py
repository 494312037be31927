"""The model being accelerated: one lean decoder, a table of families, readers of weight files."""

"""Rows of examples and of pairs, and what a run remembers of its data."""

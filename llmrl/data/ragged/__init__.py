"""Rows of different lengths: padding and stacks."""

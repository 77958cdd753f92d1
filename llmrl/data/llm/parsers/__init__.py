"""Parsers of rendered conversations, text -> messages, for people and tools: training never reads ids from text.

The last message of a text carries ``"is_complete": False`` if the marker that ends it is missing.
"""

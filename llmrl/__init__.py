"""llmrl: post-training for language models. Import what you use from its sub-packages; this module loads nothing."""

__version__ = "0.1.0"

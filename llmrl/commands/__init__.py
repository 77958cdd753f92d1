"""The commands of ``llmrl``: each one prints, returns an exit code, and imports what it needs when it is called."""

"""The plan of a run, made before weights are loaded: its parts, memory, engines, early errors."""

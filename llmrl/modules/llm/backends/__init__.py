"""The inference backends under their documented names."""

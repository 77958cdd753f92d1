"""Loading what is trained: weights, adapters, their shape."""

"""Tools that a model can call: typed functions that know nothing of tensors or environments."""

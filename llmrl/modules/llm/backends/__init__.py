"""The inference backends under the names that the documents have for them."""

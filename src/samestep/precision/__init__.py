"""Dtypes, loss scale, and the one division that ends a step."""

"""Shared helpers: dtypes, products, argument checks, autograd."""

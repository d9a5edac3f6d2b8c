"""Dtypes, products, checks of arguments, autograd helpers, shared by all operations."""

"""Atomic result files and readable file-system errors."""

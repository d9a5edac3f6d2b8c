"""Benchmarks; each is a script, and importable from the repository's root for the tests."""

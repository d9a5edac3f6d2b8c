"""Metrics of a run: losses, selection, floating-point operations, log."""

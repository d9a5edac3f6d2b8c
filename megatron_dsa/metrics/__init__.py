"""Figures of a run: losses, the selection, floating point operations, and the log."""

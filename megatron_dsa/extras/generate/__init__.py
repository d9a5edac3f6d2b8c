"""Evaluate and generate with trained checkpoints."""

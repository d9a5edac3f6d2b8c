"""Evaluation and text generation with trained checkpoints."""

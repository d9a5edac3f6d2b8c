"""Layers of Kimi Delta Attention."""

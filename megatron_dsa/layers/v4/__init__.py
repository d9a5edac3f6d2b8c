"""Layers of DeepSeek-V4."""

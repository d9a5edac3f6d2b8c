"""Layers of DeepSeek-V4 only: hyper-connections, prediction on streams, hash routing."""

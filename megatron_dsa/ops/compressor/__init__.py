"""Compressor of DeepSeek-V4: groups of tokens pooled into keys."""

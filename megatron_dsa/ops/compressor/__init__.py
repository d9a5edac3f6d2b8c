"""The compressor of DeepSeek-V4: a group of tokens becomes one key."""

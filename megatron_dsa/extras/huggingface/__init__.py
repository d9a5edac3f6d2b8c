"""Hugging Face checkpoints of DeepSeek-V3, V3.2, V4, GLM-5 and GLM-5.3, in and out."""

"""The compressor in Triton."""

"""Indexed data sets from text files: ``python -m megatron_dsa prepare-data``."""

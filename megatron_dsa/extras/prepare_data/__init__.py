"""Indexed data sets from text: ``python -m megatron_dsa prepare-data``."""

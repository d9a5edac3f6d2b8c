"""Dense indexer loss in Triton."""

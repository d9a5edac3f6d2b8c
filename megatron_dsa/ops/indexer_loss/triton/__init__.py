"""The dense indexer loss in Triton."""

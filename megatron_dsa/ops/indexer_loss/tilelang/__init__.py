"""TileLang kernel of the sparse indexer loss for Hopper; see ``docs/kernels/indexer.md``."""

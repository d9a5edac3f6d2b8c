"""TileLang kernel of the sparse indexer loss for Hopper."""

"""Lightning indexer: scores of all visible keys, and the best of them."""

"""Lightning indexer: scores of all visible keys, and selection of the best keys."""

"""KL divergence from the attention's distribution to the indexer's."""

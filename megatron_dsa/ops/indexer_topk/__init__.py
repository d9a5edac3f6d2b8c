"""The lightning indexer: score every visible key, keep the best."""

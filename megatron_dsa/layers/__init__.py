"""Parts of an attention layer: cores, indexers, compressor, rope, and how they are trained."""

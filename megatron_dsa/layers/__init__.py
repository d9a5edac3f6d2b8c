"""Parts of an attention layer."""

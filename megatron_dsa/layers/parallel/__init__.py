"""What ranks exchange: gathered keys, balanced selection, products of heads, ring attention."""

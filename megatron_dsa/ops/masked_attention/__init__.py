"""Masked dense attention: plain MLA over all keys, of which one bit mask for all heads tells."""

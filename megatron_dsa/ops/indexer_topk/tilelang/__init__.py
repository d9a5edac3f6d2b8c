"""Our own kernel of the index scores for Hopper (sm_90a), in TileLang."""

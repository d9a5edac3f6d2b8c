"""Exchange between ranks: groups, gathered keys, balanced selection."""

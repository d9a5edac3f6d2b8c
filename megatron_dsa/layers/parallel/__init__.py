"""Exchange of keys and tokens between ranks."""

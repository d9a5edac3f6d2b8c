"""Rules ``(ok, message)`` for configurations and options."""

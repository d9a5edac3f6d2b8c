"""Which keys a query sees, and which tokens a rank holds."""

"""Optional features, which the core never imports."""

"""Independent references of the package."""

"""Muon for this package's parameters: marks on them, the optimizer that reads them, the table."""

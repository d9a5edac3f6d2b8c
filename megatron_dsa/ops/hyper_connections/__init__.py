"""Hyper-connections, which replace the residual by several streams."""

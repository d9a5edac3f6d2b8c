"""Hyper-connections: a layer reads several residual streams, and writes to them."""

"""Hyper-connections: several residual streams that layers read and write."""

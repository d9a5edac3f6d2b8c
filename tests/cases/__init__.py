"""Inputs, cases and comparisons shared by test files."""

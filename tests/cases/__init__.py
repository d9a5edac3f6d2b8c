"""Inputs, cases and comparisons that several test files share."""

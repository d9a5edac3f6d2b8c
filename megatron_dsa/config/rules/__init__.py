"""Refused configurations: rules ``(ok, message)``; messages name argument, rule and fix.

They read a transformer configuration and its options, and import neither class.
"""

"""Rules ``(ok, message)``; messages name argument, rule and fix.

They read configurations and options without importing either class.
"""

"""Options, model fields, presets and rules."""

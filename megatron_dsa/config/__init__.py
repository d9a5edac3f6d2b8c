"""Configuration: options of the package, fields of models, presets and rules."""

"""Training entry points around Megatron's loop."""

"""Parts of a training script around Megatron's own loop."""

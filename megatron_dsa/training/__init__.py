"""What a training script needs besides Megatron's own loop."""

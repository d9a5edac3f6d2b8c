"""LoRA on the linears of DSA and CSA layers."""

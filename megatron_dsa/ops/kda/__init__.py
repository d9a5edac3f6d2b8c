"""Kimi Delta Attention (KDA): short convolution, gated delta rule, gated norm of the output."""

"""Relative errors that several test files allow against float64."""

import torch

#: Of the sparse attention by dtype: its output, its lse and all gradients.
SPARSE_ATTENTION = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 6e-3}

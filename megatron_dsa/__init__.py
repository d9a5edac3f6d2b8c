"""Sparse attention of DeepSeek and GLM models for released Megatron-Core wheels.

The import needs only torch. ``megatron_dsa.specs`` and ``megatron_dsa.pretrain`` check
megatron-core (:mod:`megatron_dsa.versions`). Start reading at ``docs/design/architecture.md``.
"""

__version__ = "0.2.0.dev0"

__all__ = ["__version__"]

"""Sparse attention of DeepSeek-V3.2 / GLM-5 (DSA) for released Megatron-Core wheels.

Importing this package needs torch and nothing else: no GPU, no Megatron, no kernel package.
The parts that plug into Megatron (``megatron_dsa.specs``, ``megatron_dsa.pretrain``) check the
installed megatron-core when they are imported, see :mod:`megatron_dsa.versions`.

Where to start reading: ``docs/design/architecture.md``.
"""

__version__ = "0.2.0.dev0"

__all__ = ["__version__"]

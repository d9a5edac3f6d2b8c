"""TileLang kernels for GPUs with ``mma.sync`` and ``cp.async`` (sm_80 and newer).

See ``docs/kernels/sparse_attention.md`` for GPUs that they ran on.
"""

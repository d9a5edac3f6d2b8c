"""TileLang kernels for every GPU with ``mma.sync`` and ``cp.async`` (sm_80 and newer).

``docs/kernels/sparse_attention.md`` lists what was run where.
"""

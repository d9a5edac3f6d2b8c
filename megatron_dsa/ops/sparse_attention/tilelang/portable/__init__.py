"""Our own kernels for every GPU with ``mma.sync`` and ``cp.async`` (sm_80 and newer), in TileLang.

The same programs as :mod:`..hopper`, slower there. ``docs/kernels/sparse_attention.md`` says what
was run where.
"""

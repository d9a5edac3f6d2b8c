"""TileLang kernels for GPUs with ``mma.sync`` and ``cp.async`` (sm_80 and newer)."""

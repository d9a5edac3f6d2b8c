"""Reports of training runs: ``python -m megatron_dsa report LOG_DIR``.

See ``docs/guide/reports.md``.
"""

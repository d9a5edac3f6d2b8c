"""Reports of training runs: ``python -m megatron_dsa report LOG_DIR``."""

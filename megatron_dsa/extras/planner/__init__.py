"""Plan of a training job without a GPU: ``--dsa-dry-run``."""

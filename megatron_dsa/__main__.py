"""``python -m megatron_dsa``: see :mod:`megatron_dsa.cli`."""

from megatron_dsa.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""The training entry point without this package's marks for Muon: Megatron's own behaviour.

python -m benchmarks.train.unmarked FLAGS
"""

from unittest import mock

from megatron_dsa.layers import weight_blocks
from megatron_dsa.pretrain import main

if __name__ == "__main__":
    # Modules bind these functions on import, which main() triggers.
    ignored = mock.Mock(return_value=None)
    with mock.patch.multiple(weight_blocks, mark_row_blocks=ignored, mark_table=ignored):
        main()

"""The training entry point without this package's marks for Muon: what Megatron does by itself.

python -m benchmarks.train.unmarked FLAGS
"""

from unittest import mock

from megatron_dsa.layers import weight_blocks
from megatron_dsa.pretrain import main

if __name__ == "__main__":
    # Modules take these functions when they are imported, which main() does.
    ignored = mock.Mock(return_value=None)
    with mock.patch.multiple(weight_blocks, mark_row_blocks=ignored, mark_table=ignored):
        main()

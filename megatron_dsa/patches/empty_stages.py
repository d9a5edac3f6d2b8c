"""Loading checkpoints on a pipeline stage without weights, as in the layout ``Et||tL``.

megatron-core 0.19's distributed loader leaves empty entries out of its result: ``load_checkpoint``
raises ``KeyError: 'model'`` on that rank, unless the rank has several chunks of the model.
"""

import functools
from typing import Any

from megatron_dsa.patches import replace


@functools.cache
def repair_empty_stages() -> None:
    """Let the distributed loader return the empty entries that it was given."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    @replace(serialization, "load")
    def load(original, sharded_state_dict, checkpoint_dir, *args, **kwargs):
        empty: dict[str, Any] = {
            name: {}
            for name, entry in sharded_state_dict.items()
            if isinstance(entry, dict) and not entry
        }
        loaded = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        # A tuple if it also has missing and unexpected keys.
        return empty | loaded if isinstance(loaded, dict) else (empty | loaded[0], *loaded[1:])

    dist_checkpointing.load = load

"""Repairs of the released megatron-core, installed for the rest of the process.

Each module repairs one defect, says which, and changes nothing where the defect does not show.
"""

from megatron_dsa.patches.bucket_padding import repair_offsets_of_states
from megatron_dsa.patches.checkpoint_metadata import repair_reading_of_metadata
from megatron_dsa.patches.empty_optimizers import repair_empty_optimizers
from megatron_dsa.patches.empty_stages import repair_empty_stages
from megatron_dsa.patches.optimizer_steps import repair_optimizer_steps
from megatron_dsa.patches.sgd_momentum import make_room_for_momentum


def install_checkpoint_repairs() -> None:
    """Install what reading and writing Megatron checkpoints needs; calling it again is free."""
    repair_reading_of_metadata()
    repair_offsets_of_states()
    repair_empty_optimizers()
    repair_empty_stages()
    repair_optimizer_steps()
    make_room_for_momentum()

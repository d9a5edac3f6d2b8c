"""Muon for this package's parameters: optimizer classes, patch, table."""

from megatron_dsa.patches import OURS, TABLE, Patch

TABLE["Muon"] = Patch(
    "orthogonalises tables and stacks of matrices as one matrix",
    "extras.muon.patch:read_marks_of_muon", "layer specs", "--optimizer muon", upstream=OURS,
)  # fmt: skip
TABLE["layer-wise gather"] = Patch(
    "cannot gather parameters of two precisions, nor of different sizes over gloo",
    "extras.muon.patch:repair_gather_of_layer_wise_optimizer", "layer specs",
    "--optimizer muon --use-distributed-optimizer",
)  # fmt: skip

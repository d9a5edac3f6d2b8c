"""Telling the passes of a recomputed layer apart."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether this code runs inside a backward pass, as a layer that is computed again does.

    What belongs to a microbatch once (a logged figure, a captured selection) must skip that pass.
    """
    return torch._C._current_graph_task_id() != -1

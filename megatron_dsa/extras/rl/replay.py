"""Replay of given keys instead of the indexers' selections, and capture of selections.

Training on rollouts replays the engine's selections::

    replay = IndexReplay()
    for each microbatch, in order:
        replay.add({layer: positions, ...})
    with replay.on(model):
        forward_backward_func(...)

:class:`IndexCapture` collects selections in the same format
(:mod:`megatron_dsa.ops.layout.positions`).

Layers are numbered from 1 over all stages. Only selecting layers are replayed: with index sharing
the first layer of each group, in V4 layers of ratio 4, where positions are group numbers.

Microbatches pass a layer in the same order in forward and backward, so each layer has two queues:
upcoming microbatches, and microbatches to recompute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.layers.core import CoreAttention
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.ops.common.autograd import in_backward
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.positions import (
    check_form,
    indices_to_positions,
    local_part,
    positions_to_indices,
)


class IndexReplay:
    """Positions of upcoming microbatches for every selecting layer.

    Args:
        microbatches: added in order, see :meth:`add`.
    """

    def __init__(self, microbatches: Iterable[Mapping[int, torch.Tensor]] = ()):
        self._layers: dict[int, CoreAttention] | None = None
        self._given: list[Mapping[int, torch.Tensor]] = []
        self._next: dict[int, deque[torch.Tensor]] = {}
        self._again: dict[int, deque[torch.Tensor]] = {}
        for indices in microbatches:
            self.add(indices)

    def add(self, indices: Mapping[int, torch.Tensor]) -> None:
        """Append a microbatch, before or during use.

        Args:
            indices: layer number -> positions, int32 ``[tokens, K]`` with ``K`` at most the model's
                top-k, for the query tokens of this rank or of all ranks that share the
                microbatch. Layers of other pipeline stages may be included. Host tensors, best
                pinned, are moved when their layer runs.

        Raises:
            ConfigError: not in this format, or unfit for the model in use.
        """
        for layer, positions in indices.items():
            check_form(positions, f"indices[{layer}]")
        if self._layers is None:
            self._given.append(dict(indices))
        else:
            self._enqueue(indices)

    @contextmanager
    def on(self, model: torch.nn.Module | Iterable[torch.nn.Module]) -> Iterator[IndexReplay]:
        """Replay into the layers of a model or of its chunks.

        Raises:
            ConfigError: at the start, if layers or widths do not fit the model; inside, if a
                microbatch has no indices; at the end, if indices are left over.
        """
        layers = _selecting_layers(model, "replay")
        for core in layers.values():
            require(
                core.options.indexer_pool_size == 1,
                "a replay needs --dsa-indexer-pool-size 1: the loss of pools takes lists of whole "
                "pools; drop it",
            )
        with _attached(layers, "replay", "selection_source", self):
            self._layers = layers
            self._next = {layer: deque() for layer in layers}
            self._again = {layer: deque() for layer in layers}
            try:
                given, self._given = self._given, []
                for indices in given:
                    self._enqueue(indices)
                yield self
                self._refuse_leftovers()
            finally:
                self._layers = None

    def _enqueue(self, indices: Mapping[int, torch.Tensor]) -> None:
        assert self._layers is not None
        missing = [layer for layer in self._layers if layer not in indices]
        require(
            not missing,
            f"indices must have an entry for every selecting layer of this rank, layer(s) "
            f"{_listed(missing)} missing: give all layers that IndexCapture returns",
        )
        for core in self._layers.values():
            unknown = sorted(set(indices) - set(core.selecting_layers))
            require(
                not unknown,
                f"indices must be of layers that select (numbered from 1), which layer(s) "
                f"{_listed(unknown)} of this model do not: drop them",
            )
        for layer, core in self._layers.items():
            width, topk = indices[layer].shape[1], core.config.dsa_indexer_topk
            require(
                width <= topk,
                f"indices[{layer}] must list at most --dsa-indexer-topk = {topk} keys per query, "
                f"got {width}: select as many in both places",
            )
            self._next[layer].append(indices[layer])

    def take(self, layer: int, training: bool) -> torch.Tensor:
        """Return the positions of a layer's microbatch; call once per forward pass.

        ``training`` without gradients is the first pass of a recomputed layer.
        """
        if in_backward():
            if not self._again[layer]:
                raise ConfigError(
                    f"indices: layer {layer} is computed again in a backward pass, but its first "
                    "pass ran with gradients or outside of replay.on(model): keep the whole step "
                    "inside, and recompute with Megatron's --recompute-* flags"
                )
            return self._again[layer].popleft()
        if not self._next[layer]:
            raise ConfigError(
                f"indices: layer {layer} runs a microbatch that has none: call replay.add once for "
                "every microbatch, before its forward pass"
            )
        positions = self._next[layer].popleft()
        if training and not torch.is_grad_enabled():
            self._again[layer].append(positions)
        return positions

    def given(
        self, core: CoreAttention, layout: Layout, keys: Layout, ranks: Ranks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"indices[{core.layer_number}]"
        positions = local_part(
            self.take(core.layer_number, core.training), layout, ranks.query_sharding, name
        )
        return positions_to_indices(
            positions, keys, core.config.dsa_indexer_topk,
            name=name, workspace_bytes=core.options.policy.workspace_bytes,
        )  # fmt: skip

    def _refuse_leftovers(self) -> None:
        unused = {layer: len(queue) for layer, queue in self._next.items() if queue}
        require(
            not unused,
            f"indices: of layer(s) {_listed(unused)} those of {max(unused.values(), default=0)} "
            "microbatch(es) were not used: add as many as the step runs",
        )
        waiting = {layer: len(queue) for layer, queue in self._again.items() if queue}
        require(
            not waiting,
            f"indices: layer(s) {_listed(waiting)} ran in training mode without gradients and were "
            "not computed again in a backward pass: for a forward pass alone, call model.eval()",
        )


class IndexCapture:
    """Positions that the layers of a model select, microbatch by microbatch.

    Attributes:
        microbatches: per microbatch, selecting layer -> int32 ``[local query tokens, topk]``,
            ascending, ``-1`` padded, on the model's device.
    """

    def __init__(self):
        self._selected: dict[int, list[torch.Tensor]] = {}

    @property
    def microbatches(self) -> list[dict[int, torch.Tensor]]:
        number = min((len(seen) for seen in self._selected.values()), default=0)
        return [{layer: seen[i] for layer, seen in self._selected.items()} for i in range(number)]

    @contextmanager
    def on(self, model: torch.nn.Module | Iterable[torch.nn.Module]) -> Iterator[IndexCapture]:
        """Collect the selections in the layers of a model or of its chunks."""
        layers = _selecting_layers(model, "capture")
        for layer in layers:
            self._selected.setdefault(layer, [])
        with _attached(layers, "capture", "selection_sink", self):
            yield self

    def put(self, core: CoreAttention, indices: torch.Tensor, keys: Layout) -> None:
        workspace = core.options.policy.workspace_bytes
        positions = indices_to_positions(indices, keys, workspace_bytes=workspace)
        self._selected[core.layer_number].append(positions)


def _selecting_layers(model, what: str) -> dict[int, CoreAttention]:
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    cores = [m for chunk in chunks for m in chunk.modules() if isinstance(m, CoreAttention)]
    for core in cores:
        require(
            core.options.stage == "sparse",
            f"model must be in stage 'sparse' for {what}, got --dsa-stage {core.options.stage}: "
            "other stages attend to all keys",
        )
        require(
            core.config.cuda_graph_impl == "none",
            f"model must be built without CUDA graphs for {what}, got --cuda-graph-impl "
            f"{core.config.cuda_graph_impl}: a replayed graph takes and gives no selections",
        )
    layers = {core.layer_number: core for core in cores if core.selects}
    require(
        len(layers) == sum(core.selects for core in cores),
        "model must be one model (or its chunks): layer numbers occur more than once",
    )
    return layers


@contextmanager
def _attached(
    layers: dict[int, CoreAttention], what: str, name: str, value: object
) -> Iterator[None]:
    for layer, core in layers.items():
        require(
            getattr(core, name) is None,
            f"model: layer {layer} has a {what} already: leave its `with` block first",
        )
    for core in layers.values():
        setattr(core, name, value)
    try:
        yield
    finally:
        for core in layers.values():
            setattr(core, name, None)


def _listed(layers: Iterable[int]) -> str:
    return ", ".join(str(layer) for layer in sorted(layers))

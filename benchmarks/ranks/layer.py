"""One rank's measurements of an attention layer: times, memory, bytes sent, communication."""

import gc

import torch

from benchmarks.layer import OUT_ERROR_LIMIT
from benchmarks.layer.graph import StepGraph, checked_error
from benchmarks.layer.peers import build
from benchmarks.ranks.cases import BASES, MASKED_TP_WAYS, ONE_RANK_DENSE, Case
from benchmarks.ranks.design import Design, formula_bytes, hidden_bytes
from benchmarks.ranks.plain import OVERLAPPED, PLAIN, collectives
from benchmarks.ranks.timing import measured, traced_shares
from benchmarks.ranks.traffic import counted
from benchmarks.timing import Clock, what_ran
from megatron_dsa.ops.dispatch import reset_report


def measure_layer(case: Case, way: str, device: torch.device, settings: dict) -> dict:
    """Measure a layer on this rank; return the answer for :func:`benchmarks.ranks.merge.merge`."""
    clock, spec = Clock(device), case.spec(way)
    grid = case.grid_of(way)
    dense = BASES.get(way) == ONE_RANK_DENSE
    (layer, remark), result = build("dense" if dense else "ours", spec, device), {}
    with collectives(PLAIN if way == PLAIN else OVERLAPPED):
        reset_report()
        # Also compiles and allocates gradients, before the measured step.
        with counted() as traffic:
            result["squares"] = layer.first_step()
        clock.wait()
        gc.collect()
        step = layer.step
        if case.graph:
            ran = what_ran()  # replays dispatch nothing
            graph = StepGraph(layer, clock)
            result["graph_error"] = checked_error(layer, graph, OUT_ERROR_LIMIT)
            step = graph.replay
        result |= measured(layer.forward, step, clock, device, settings)
        if case.graph:
            result |= {"ran": ran, "peak_mib": graph.peak_mib}
        result["ran"] = "; ".join(filter(None, (remark, result["ran"])))
        if grid.ranks > 1 and clock.on_gpu:
            result |= traced_shares(step, clock, device)
    for times in result["times"].values():
        times[:] = [ms / case.layers for ms in times]
    tokens = layer.own_tokens
    design = Design(layer.config, case.ratio, tokens, grid.tp, grid.cp, layer.sharding.runs(None))
    if grid.ranks > 1:
        result["bytes_per_token"] = traffic.bytes / tokens / case.layers
        if way not in MASKED_TP_WAYS and not dense:  # the formulas are for lists of keys
            result["formula_bytes_per_token"] = formula_bytes(design) / tokens
    if grid.cp > 1 and grid.tp == 1:  # tensor-parallel linears gather hidden states anyway
        result["hidden_bytes_per_token"] = hidden_bytes(design) / tokens
    return result

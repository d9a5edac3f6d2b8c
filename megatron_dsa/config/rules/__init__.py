"""Refused configurations: rules ``(ok, message)``; messages name argument, rule and fix.

They read a transformer configuration and its options, and import neither class.
"""

from megatron_dsa.config.rules.csa import CSA_RATIO, csa_rules
from megatron_dsa.config.rules.cuda_graphs import (
    PER_LAYER,
    graph_modules,
    graph_rules,
    graphs_attention,
)
from megatron_dsa.config.rules.hash_routing import hash_rules
from megatron_dsa.config.rules.hyper_connections import (
    hyper_connection_rules,
    predicts_apart,
)
from megatron_dsa.config.rules.lora import (
    adapted_linears,
    adapts_indexer,
    existing_linears,
    linears_named,
    lora_option_rules,
    lora_rules,
    modules_of_linears,
    rank_and_alpha,
)
from megatron_dsa.config.rules.model import dsa_rules, masked_rules, tp_mode_rules
from megatron_dsa.config.rules.sizes import is_moe_layer

__all__ = [
    "CSA_RATIO",
    "PER_LAYER",
    "adapted_linears",
    "adapts_indexer",
    "csa_rules",
    "dsa_rules",
    "existing_linears",
    "graph_modules",
    "graph_rules",
    "graphs_attention",
    "hash_rules",
    "hyper_connection_rules",
    "is_moe_layer",
    "linears_named",
    "lora_option_rules",
    "lora_rules",
    "masked_rules",
    "modules_of_linears",
    "predicts_apart",
    "rank_and_alpha",
    "tp_mode_rules",
]

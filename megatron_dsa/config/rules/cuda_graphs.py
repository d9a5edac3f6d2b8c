"""Rules of ``--cuda-graph-impl`` that Megatron lacks."""

from collections.abc import Iterator
from typing import Any

from megatron_dsa.config.rules.table import Must

FLAG = "--cuda-graph-impl"
#: Implementations that capture single layers or their attention.
PER_LAYER = ("local", "transformer_engine")
#: Attention modules that selective recompute may include.
_RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj")


def graph_modules(config: Any) -> set[str]:
    """Return the captured modules of a layer, empty for the whole layer."""
    return {getattr(module, "name", module) for module in config.cuda_graph_modules or ()}


def graphs_attention(config: Any) -> bool:
    modules = graph_modules(config)
    return config.cuda_graph_impl in PER_LAYER and (not modules or "attn" in modules)


def graph_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    impl = config.cuda_graph_impl
    if impl == "none":
        return
    case = f"with {FLAG} {impl}"
    yield (
        impl == "local" or config.cuda_graph_warmup_steps > 0,
        f"--cuda-graph-warmup-steps must be at least 1 {case}, got "
        f"{config.cuda_graph_warmup_steps}: kernels are compiled and tables are made in steps that "
        "are not captured",
    )
    padded = config.moe_expert_capacity_factor and config.moe_pad_expert_input_to_capacity
    yield (
        # Megatron itself checks ``--cuda-graph-modules``.
        config.num_moe_experts is None or padded or graph_modules(config),
        f"{FLAG} {impl} cannot capture layers with experts whole: the host reads how many tokens "
        f"each expert gets. Add --cuda-graph-modules attn (with {FLAG} local or "
        "transformer_engine), or pad experts to a capacity (--moe-expert-capacity-factor, "
        "--moe-pad-expert-input-to-capacity)",
    )
    if config.recompute_granularity == "selective" and graphs_attention(config):
        named = [name for name in _RECOMPUTED if name in (config.recompute_modules or ())]
        yield (
            not named,
            f"--recompute-modules must not name {', '.join(named)} {case}: Megatron captures "
            "core_attn without recomputing it, and the gradients of weights inside of the others "
            f"are lost; drop them, or use {FLAG} full_iteration",
        )
    if impl == "local":
        others = graph_modules(config) - {"attn"}
        yield (
            not others,
            f"--cuda-graph-modules must be unset (whole layers) or attn {case}, got "
            f"{', '.join(sorted(others))}: Megatron has graphs of these in layers of hybrid models "
            "only; drop them",
        )
    if impl != "transformer_engine":
        return
    yield Must(
        "transformer_impl", "transformer_engine",
        f"transformer-engine captures its own layers; use {FLAG} local",
    ).check(config, case=case)  # fmt: skip
    yield (
        options.stage != "warmup" or not options.freeze_main,
        f"{FLAG} {impl} must not be used in a frozen warm-up: Megatron captures the attention "
        "without the layer that the indexer's loss hangs onto, and the indexers would learn "
        f"nothing; use {FLAG} local, or add --dsa-warmup-train-all",
    )

"""Options without a field in Megatron's configuration."""

# Do not import ``annotations`` from ``__future__``: flags come from field types.
from dataclasses import dataclass
from typing import Literal

from megatron_dsa.config.fields import option
from megatron_dsa.config.rules.lora import lora_option_rules
from megatron_dsa.config.rules.ranges import option_rules
from megatron_dsa.errors import require
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES, Policy
from megatron_dsa.ops.dispatch.policy import FLAG, VARIABLE, parse_named
from megatron_dsa.ops.layout.sharding import CPLayout

#: Tensor-parallel sharding: by heads, by tokens, or attention by heads and the indexer by tokens.
TPMode = Literal["heads", "sequence", "select"]


@dataclass(frozen=True)
class DSAOptions:
    """Settings without a field in Megatron's configuration.

    Stored as ``dsa`` of the transformer configuration; without it, defaults apply.
    """

    stage: Literal["dense", "warmup", "sparse"] = option(
        "sparse",
        "--dsa-stage",
        "dense: plain MLA without indexer; warmup: dense attention, train the indexer on it; "
        "sparse: attend to the indexer's top-k.",
    )
    freeze_main: bool = option(
        True,
        "--dsa-warmup-train-all",
        "In stage warmup, train the main model too (default: only the indexer).",
    )
    #: Prefer fused implementations; False with ``--attention-backend dsa_unfused``.
    fused: bool = True
    strict: bool = option(
        False,
        "--dsa-strict",
        "Stop at start-up if an operation has no fused implementation that can run.",
    )
    workspace_bytes: int = option(
        DEFAULT_WORKSPACE_BYTES,
        "--dsa-workspace-mib",
        "Memory that an implementation may use for temporaries, in MiB.",
        unit=2**20,
    )
    recompute: Literal["nothing", "latent_output", "queries"] = option(
        "nothing",
        "--dsa-recompute",
        "What sparse attention computes again in the backward beside Megatron's --recompute-*: its "
        "output in the space of the latents (latent_output, 1 KiB per token and head in V3.2), or "
        "queries and outputs of V4's heads, a block of tokens at a time (queries, 3 KiB).",
    )
    indexer_pool_size: int = option(
        1,
        "--dsa-indexer-pool-size",
        "Consecutive tokens whose index keys are pooled into one; --dsa-indexer-topk // size pools "
        "are selected, and the last tokens that fill no pool. GLM-5.3 has 4.",
    )
    output_gate: bool = option(
        False,
        "--dsa-output-gate",
        "Multiply the heads' outputs by a sigmoid gate, a linear map of the layer's input, before "
        "the output projection. Hy4 has one, and --softmax-type learnable: a sink per head.",
    )
    health_tokens: int = option(
        16,
        "--dsa-health-tokens",
        "Queries per layer on which the selection is measured for the log, once per iteration; 0 "
        "turns this off.",
    )
    evaluate_indexer: bool = option(
        False,
        "--dsa-evaluate-indexer",
        "Compute and log the indexer loss in evaluation passes, too.",
    )
    cp_layout: CPLayout = option(
        "zigzag",
        "--dsa-cp-layout",
        "How context parallelism shards tokens: two chunks per rank, of every document (zigzag) or "
        "of all packed tokens (zigzag_rows), or one part per rank (contiguous).",
    )
    tp_mode: Literal["auto", "heads", "sequence", "select"] = option(
        "auto",
        "--dsa-tp-mode",
        "Under tensor parallelism a rank attends for all tokens with its heads (heads), or for its "
        "part of the sequence with all heads (sequence), or selects keys for its own tokens and "
        "attends with its own heads (select, masked attention only); auto: select where attention "
        "is masked, else sequence where a rank would have less than 64 heads, which leave a GPU's "
        "tile empty.",
    )
    selected_attention: Literal["auto", "masked", "sparse"] = option(
        "auto",
        "--dsa-selected-attention",
        "How DSA attends to selected keys in stage sparse: by absorbed attention to lists of "
        "latents (sparse), or by plain MLA over all keys under a bit mask (masked), which is "
        "faster for short sequences; auto: masked where fused kernels can run it and it is "
        "cheaper.",
    )
    #: Longest sequence in tokens (``--seq-length``).
    sequence_length: int | None = None
    #: Number of sequences in an unpacked microbatch.
    interleaved_sequences: int = 1
    #: Number of maximum-length sequences in a packed microbatch.
    packed_sequences: int = 1
    cp_exchange: Literal["auto", "latents", "keys"] = option(
        "auto",
        "--dsa-cp-exchange",
        "What context-parallel ranks exchange in the dense stages: MLA's latents, gathered, or "
        "keys and values of the local heads, round a ring; auto: the narrower.",
    )
    indexer_numerics: Literal["exact", "deepgemm-fp8"] = option(
        "exact",
        "--dsa-indexer-numerics",
        "Arithmetic of the index scores that select keys: of the indexer's tensors as they are "
        "(exact), or in fp8 as SGLang and vLLM form them with DeepGEMM, for training on rollouts "
        "(deepgemm-fp8). The indexer's loss and gradients are the same.",
    )
    kv_rounding: Literal["none", "fp8-cache"] = option(
        "none",
        "--dsa-kv-rounding",
        "Round MLA's latents, or V4's keys, to what the fp8 caches of inference engines hold, for "
        "training on rollouts (fp8-cache). The gradient passes straight through.",
    )
    fp8_indexer: bool = option(
        False,
        "--dsa-fp8-indexer",
        "With --fp8-format, quantise the indexer's linears too (default: they run in --bf16). The "
        "compressor of V4's indexer is never quantised.",
    )
    latent_norm_epsilon: float | None = option(
        None,
        "--dsa-latent-norm-epsilon",
        "Epsilon of the norms of MLA's latents (default: --norm-epsilon). GLM-5 has another.",
    )
    #: Pairs ``(operation, implementation)``; each implementation runs or raises.
    named: tuple[tuple[str, str], ...] = option(
        (),
        FLAG,
        "Implementations that run or stop the start-up, by operation, for example "
        "sparse_attention_forward=flashmla. python -m megatron_dsa info --support-table lists all "
        f"names. Environment: {VARIABLE}, split by commas.",
        metavar="OPERATION=NAME",
        parse=parse_named,
    )
    indexer_loss_queries: float = option(
        1 / 8,
        "--dsa-indexer-loss-queries",
        "Share of the query tokens on which the indexer is trained: tiles of 64, drawn anew for "
        "every layer and microbatch. Loss and gradients are scaled, and the same in the mean; "
        "evaluation takes all. 1: all.",
    )
    indexer_loss_heads: float = option(
        1.0,
        "--dsa-indexer-loss-heads",
        "Share of the heads that teach a query token of --dsa-indexer-loss-queries below 1: 1/2, "
        "1/4, ..., 1/64. Gradients are the same in the mean; the logged loss is larger. Ranks that "
        "share the heads exchange no sums of them. 1: all.",
    )
    indexer_teacher: Literal["own", "served"] = option(
        "own",
        "--dsa-indexer-teacher",
        "Where layers reuse a selection (--dsa-indexer-topk-freq), the attention that its indexer "
        "learns with the sparse loss: of its own layer (own), or the mean of all layers that "
        "attend to its selection (served). Evaluation takes its own layer's.",
    )
    csa_teacher: Literal["attention", "compressed"] = option(
        "attention",
        "--dsa-csa-teacher",
        "What the indexer of CSA layers learns: the probabilities of compressed keys beside window "
        "and sink (attention), or a softmax over compressed keys alone (compressed, an older "
        "reading of the model).",
    )

    muon_per_head: Literal["none", "attention", "all"] = option(
        "none",
        "--dsa-muon-per-head",
        "With --optimizer muon, orthogonalise up projections head by head: the attention's "
        "(queries, MLA's keys and values), or the indexer's queries, too (all). The output groups "
        "of V4's attention are always orthogonalised one by one.",
    )
    lora_rank: int | None = option(
        None,
        "--lora-rank",
        "Train adapters of this rank (LoRA) on the linears that --lora-targets names, and freeze "
        "everything else.",
    )
    lora_alpha: float | None = option(
        None,
        "--lora-alpha",
        "An adapter's output is multiplied by this number divided by the rank (default: the rank).",
    )
    lora_targets: tuple[str, ...] = option(
        (),
        "--lora-targets",
        "Linears that get adapters, by the names of released checkpoints or their ends, as in "
        "PEFT: for example q_b_proj indexer.wq_b (V4: attn.wq_b), or all-linear (all but routed "
        "experts, router, embedding and output layer).",
        metavar="NAME",
        parse=lambda words, _flag: tuple(dict.fromkeys(words)),
    )

    def __post_init__(self):
        for ok, message in (*option_rules(DSAOptions, self), *lora_option_rules(self)):
            require(ok, message)
        for name in ("sequence_length", "interleaved_sequences", "packed_sequences"):
            value = getattr(self, name)
            require(
                value is None or value >= 1,
                f"DSAOptions.{name} must be at least 1, got {value}: give --seq-length or "
                "--micro-batch-size",
            )
        # Configuration files give lists, but dispatch needs hashable tuples.
        object.__setattr__(self, "named", tuple(tuple(pair) for pair in self.named))
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))

    @property
    def head_parts(self) -> int:
        return round(1 / self.indexer_loss_heads)

    def describe_loss(self) -> str:
        queries, heads = (
            "all" if share == 1 else f"1/{round(1 / share)}" if 1 / share % 1 == 0 else f"{share:g}"
            for share in (self.indexer_loss_queries, self.indexer_loss_heads)
        )
        return f"indexer loss: {queries} of the query tokens, teacher of {heads} of the heads"

    @property
    def policy(self) -> Policy:
        return Policy(
            self.fused, self.strict, self.workspace_bytes, self.named, self.indexer_numerics
        )

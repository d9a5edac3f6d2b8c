"""Flags of parallel layouts and of recomputation."""

TP2_HEADS = {
    "--tensor-model-parallel-size": 2,
    "--sequence-parallel": True,
    "--dsa-tp-mode": "heads",
}
TP2_SEQUENCE = TP2_HEADS | {"--dsa-tp-mode": "sequence"}
CP2 = {"--context-parallel-size": 2}
FULL_RECOMPUTE = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": 1,
}
#: Only packed tokens of documents can be cut into equal parts.
PACKED = {"--dataloader-inter-document-masking": True, "--dsa-cp-layout": "zigzag_rows"}
#: DeepSeek-V4's attention for the default test model.
SMALL_V4 = {
    "--csa-compress-ratios": [0, 4],
    "--csa-window-size": 16,
    "--csa-compress-rotary-base": 160000,
    "--kv-lora-rank": 16,
    "--v-head-dim": 24,
    "--o-groups": 2,
    "--o-lora-rank": 16,
    "--dsa-indexer-rope-interleaved": True,
}
LAYOUTS = {
    "TP2 by heads": (TP2_HEADS, 2),
    "TP2 by sequence and CP2": (TP2_SEQUENCE | CP2, 4),
    "TP2 and CP2, selection by sequence, masked attention by heads": (
        TP2_HEADS | CP2 | {"--dsa-tp-mode": "select", "--dsa-selected-attention": "masked"}, 4,
    ),
    # Several features share a run, because starting processes takes the time.
    "CP2 contiguous, full recompute, per-token loss, one microbatch of 8": (
        CP2
        | FULL_RECOMPUTE
        | {"--dsa-cp-layout": "contiguous"}
        | {"--calculate-per-token-loss": True, "--micro-batch-size": 8},
        2,
    ),
    "PP2 and CP2": ({"--pipeline-model-parallel-size": 2} | CP2, 4),
    "PP2": ({"--pipeline-model-parallel-size": 2}, 2),
    "DP2 with distributed optimizer": (
        {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}, 2,
    ),
    "DP2 with overlapped gradient reduction": ({"--overlap-grad-reduce": True}, 2),
    "one microbatch of 8 instead of four of 2": ({"--micro-batch-size": 8}, 1),
    "full recompute": (FULL_RECOMPUTE, 1),
    "selective recompute": (
        {
            "--recompute-granularity": "selective",
            "--recompute-modules": ["core_attn", "mla_up_proj"],
        },
        1,
    ),
    "small workspace": ({"--dsa-workspace-mib": 1}, 1),
}  # fmt: skip

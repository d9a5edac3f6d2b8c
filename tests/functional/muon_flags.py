"""Flags of Muon, and the models trained with it."""

#: DeepSeek-V4's update, with fp32 products for comparisons.
MUON = {
    "--optimizer": "muon",
    "--muon-momentum": 0.95,
    "--muon-nesterov": True,
    "--muon-extra-scale-factor": 0.18,
    "--muon-tp-mode": "duplicated",
    "--muon-fp32-matmul-prec": "high",
    "--dsa-muon-per-head": "all",
    "--weight-decay": 0.1,
}
#: All kinds of V4's layers under hyper-connections, with four output groups and experts.
V4 = {
    "--num-layers": 3,
    "--csa-compress-ratios": [0, 4, 16],
    "--csa-window-size": 12,
    "--csa-compress-rotary-base": 160000,
    "--kv-lora-rank": 24,
    "--qk-head-dim": 24,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 32,
    "--o-groups": 4,
    "--o-lora-rank": 16,
    "--dsa-indexer-topk": 6,
    "--dsa-indexer-rope-interleaved": True,
    "--hc-mult": 4,
    "--hc-sinkhorn-iters": 5,
}
EXPERTS = {
    "--num-experts": 4,
    "--moe-layer-freq": "([0]*1+[1]*2)",
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-router-load-balancing-type": "none",
}

"""Table of all patches of megatron-core, which ``info`` prints.

Patches change no behaviour beyond the defect.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet

from megatron_dsa.versions import host_version, parse_version

UNREPORTED = "unreported"
#: Value of ``upstream`` in patches that adapt Megatron to this package or host.
OURS = "none: of this package"


class Patch(NamedTuple):
    """One patch of Megatron.

    Attributes:
        defect: Megatron's behaviour without the patch.
        installer: idempotent ``module:function`` in ``megatron_dsa``.
        by: code that installs the patch.
        when: runs that need the patch.
        needed: ``when`` as code, for layer specs.
        upstream: number in NVIDIA/Megatron-LM.
        versions: megatron-core versions with the defect.
    """

    defect: str
    installer: str
    by: Literal["entry point", "checkpoints", "layer specs", "layers"]
    when: str = "always"
    needed: Callable[[Any], bool] = lambda _config: True
    upstream: str = UNREPORTED
    versions: str = ">=0.19"

    def applies(self) -> bool:
        release = ".".join(map(str, parse_version(host_version() or "0")))
        return release in SpecifierSet(self.versions)

    def install(self, *arguments: Any) -> Any:
        if not self.applies():
            return None
        module, _, function = self.installer.partition(":")
        return getattr(importlib.import_module(f"megatron_dsa.{module}"), function)(*arguments)


def _has_streams(config: Any) -> bool:
    return getattr(config, "hc_mult", 1) > 1


def mixes_precisions(config: Any) -> bool:
    """Return True if some parameters of a 16-bit model stay in fp32; also for parsed arguments."""
    flag = getattr(config, "dsa_indexer_pool_size", 1)
    pools = getattr(getattr(config, "dsa", None), "indexer_pool_size", flag) > 1
    csa = getattr(config, "csa_compress_ratios", None) is not None
    kda = getattr(config, "linear_attention_freq", None) is not None
    sinks = getattr(config, "softmax_type", None) == "learnable"
    return _has_streams(config) or csa or pools or kda or sinks


#: Flags of :func:`mixes_precisions`.
MIXED = (
    "--csa-compress-ratios, --linear-attention-freq, --softmax-type learnable, or --hc-mult or "
    "--dsa-indexer-pool-size above 1"
)


def _predicts(config: Any) -> bool:
    return bool(getattr(config, "mtp_num_layers", None))


def _fuses_gradients(config: Any) -> bool:
    return config.transformer_impl == "transformer_engine" and config.gradient_accumulation_fusion


#: Patches in installation order, since some patches wrap the same method.
TABLE: dict[str, Patch] = {
    "no GPU": Patch(
        "says device='cuda' in hundreds of places",
        "patches.cpu_host:activate", "entry point", "machines without a GPU", upstream=OURS),
    "transformer-engine": Patch(
        "ends in the errors of a transformer-engine that cannot be imported or lacks its GPU",
        "patches.cpu_host:hide_unusable_transformer_engine", "entry point", "such installations"),
    "dataset helper": Patch(
        "runs a Makefile that the wheel lacks",
        "training.launching:use_compiled_dataset_helper", "entry point", "released wheels"),
    "tracker file": Patch(
        "leaves the tracker file empty when killed in a save, and cannot start from an empty one",
        "patches.tracker_file:keep_tracker_file_whole", "entry point", "checkpoints in files"),
    "quiet output": Patch(
        "prints nine hundred lines of arguments and parameters at each start",
        "training.quiet_output:quiet_output", "entry point", "no --logging-level 10",
        upstream=OURS),
    "loading": Patch(
        "refuses checkpoints without indexers, or with names of another layer set or kind of model",
        "training.checkpoints:prepare_loading", "entry point", upstream=OURS),
    "prediction layers": Patch(
        "derives layers of multi-token prediction from its own dense spec",
        "training.model:DSAModelBuilder", "entry point", "--mtp-num-layers", upstream=OURS),
    "checkpoint metadata": Patch(
        "cannot list the tensors of checkpoints that torch 2.15 wrote",
        "patches.loading:repair_reading_of_metadata", "checkpoints", "torch 2.15"),
    "bucket padding": Patch(
        "saves optimizer states with a part of their neighbours' from the second bucket on",
        "patches.bucket_padding:repair_offsets_of_states", "checkpoints",
        "--dist-ckpt-optim-fully-reshardable", versions="<0.20"),
    "empty optimizers": Patch(
        "cannot save optimizers without parameters, nor count their steps",
        "patches.optimizer_states:repair_empty_optimizers", "checkpoints",
        "ranks that train nothing"),
    "empty stages": Patch(
        "raises KeyError when a pipeline stage without weights loads",
        "patches.loading:repair_empty_stages", "checkpoints",
        "pipeline stages without weights"),
    "optimizer steps": Patch(
        "loses Adam's count of steps between optimizers of different packages",
        "patches.optimizer_states:repair_optimizer_steps", "checkpoints", "torch's Adam"),
    "SGD momentum": Patch(
        "ends in a TypeError when SGD resumes",
        "patches.optimizer_states:make_room_for_momentum", "checkpoints", "--optimizer sgd"),
    "fp32 checkpoints, plain": Patch(
        "mistakes parameters for each other when it saves 16-bit and fp32 ones in one group",
        "patches.fp32_checkpoints:name_all_parameters_in_plain_checkpoints", "layer specs",
        MIXED, mixes_precisions, "5835", "<0.20"),
    "fp32 checkpoints": Patch(
        "does the same with --use-distributed-optimizer",
        "patches.fp32_checkpoints:index_fp32_parameters_of_distributed_optimizer", "layer specs",
        MIXED, mixes_precisions, "5929"),
    "packed targets": Patch(
        "shifts targets of multi-token prediction across documents that are padded one by one",
        "patches.prediction:shift_within_padded_documents", "layer specs",
        "padded packed batches"),
    "prediction loss": Patch(
        "divides the loss of multi-token prediction by the tokens of one context-parallel rank",
        "patches.prediction:count_prediction_tokens_of_all_ranks", "layer specs",
        "--context-parallel-size above 1"),
    "token ids": Patch(
        "hands decoders only the embeddings of tokens",
        "patches.token_ids:hand_token_ids_to_layers", "layer specs", "--moe-hash-layers",
        lambda config: getattr(config, "moe_hash_layers", 0) > 0, OURS),
    "stream pipelines": Patch(
        "takes --hidden-size for the width of what pipeline stages exchange",
        "patches.stream_pipelines:send_streams_between_stages", "layer specs",
        "--hc-mult above 1", _has_streams, OURS),
    "prediction blocks": Patch(
        "builds its own class of block whatever class a spec of multi-token prediction names",
        "patches.prediction:build_prediction_blocks_from_specs", "layer specs",
        "--hc-mult above 1", _has_streams, OURS),
    "prediction without engine": Patch(
        "looks for transformer-engine's classes in multi-token prediction where it has none",
        "patches.prediction:find_no_inference_linears_without_engine", "layer specs",
        "--mtp-num-layers without transformer-engine", _predicts, versions=">=0.20"),
    "unfused linears": Patch(
        "asks its own linears for a kernel of Apex where transformer-engine's fuse by themselves",
        "patches.unfused_linears:leave_linears_unfused_without_apex", "layer specs",
        "transformer-engine without Apex", _fuses_gradients),
    "graph buffers": Patch(
        "frees inputs of captured layers before their backward pass is captured",
        "patches.graph_buffers:keep_graph_buffers_until_backward", "layers",
        "--cuda-graph-impl local"),
    "training log": Patch(
        "logs no figures of frozen indexers, and the first step in two lines",
        "metrics.log:install_logging", "layers", upstream=OURS),
    "throughput": Patch(
        "counts sparse layers as if every query attended to all visible keys",
        "metrics.throughput:install_throughput", "layers", upstream=OURS),
}  # fmt: skip


def install(name: str, *arguments: Any) -> Any:
    return TABLE[name].install(*arguments)


def install_checkpoint_repairs() -> None:
    for patch in TABLE.values():
        if patch.by == "checkpoints":
            patch.install()


def install_for_layers(config: Any) -> None:
    install_checkpoint_repairs()
    for patch in TABLE.values():
        if patch.by == "layer specs" and patch.needed(config):
            patch.install()


def install_for_model(config: Any) -> None:
    """Install logging for a model; call on every pipeline rank."""
    install("training log", config)
    install("throughput", config)


def described() -> list[str]:
    return [
        f"{name} ({patch.when}; megatron-core {patch.versions}{_state(patch)}; upstream "
        f"{patch.upstream}): {patch.defect}"
        for name, patch in TABLE.items()
    ]


def _state(patch: Patch) -> str:
    return "" if patch.applies() else ", not this one"


def replace(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Decorate a replacement, whose first argument is the original function."""
    original = getattr(owner, name)

    def decorate(function: Callable) -> Callable:
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return decorate

"""``examples/bridge_recipes.py`` without a GPU; ``--set`` changes a recipe's fields."""

import argparse
import ast
import functools
import runpy
import types
from typing import Any

import torch

from megatron_dsa.config.model import is_indexer_parameter
from megatron_dsa.config.options import DSAOptions
from megatron_dsa.patches import cpu_host
from tests.cases.bridge import stand_ins

#: Layers and arithmetic of the reference runs: fp32, without transformer-engine and Apex.
PLAIN = {
    "model.transformer_impl": "local",
    "model.persist_layer_norm": False,
    "model.bias_activation_fusion": False,
    "model.bias_dropout_fusion": False,
    "model.cross_entropy_loss_fusion": False,
    "model.gradient_accumulation_fusion": False,
    "model.masked_softmax_fusion": False,
    "model.apply_rope_fusion": False,
    "model.moe_grouped_gemm": False,
    "model.moe_permute_fusion": False,
    "model.moe_shared_expert_overlap": False,
    "model.moe_token_dispatcher_type": "alltoall",
    "mixed_precision": None,
    "dataset.num_workers": 0,
}
ON_A_CPU = {"model.use_cpu_initialization": True, "dist.distributed_backend": "gloo"}


def start_without_gpu() -> None:
    """Patch Bridge's training to start without a GPU."""
    from megatron.bridge.training import setup

    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _device: None


def moves() -> Any:
    """Return a callback that prints the number of changed parameters."""
    from megatron.bridge.training.callbacks import Callback

    def parameters(context) -> dict[str, torch.Tensor]:
        (model,) = context.model
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}

    class Moves(Callback):
        def on_train_start(self, context):
            self.before = parameters(context)

        def on_train_end(self, context):
            after = parameters(context)
            moved = [name for name, old in self.before.items() if not torch.equal(old, after[name])]
            indexers = sum(map(is_indexer_parameter, moved))
            print(f"{len(moved)} of {len(after)} parameters moved, {indexers} of indexers")

    return Moves()


def set_field(config: Any, path: str, value: Any) -> None:
    """Set ``config.a.b`` for an existing path ``a.b``."""
    *owners, name = path.split(".")
    for owner in owners:
        config = getattr(config, owner)
    getattr(config, name)
    setattr(config, name, value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=("pretrain", "finetune"))
    parser.add_argument("--checkpoint")
    parser.add_argument("--data")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    with stand_ins():
        example = types.SimpleNamespace(**runpy.run_path("examples/bridge_recipes.py"))
    if cpu_host.needed():
        start_without_gpu()
    changes = PLAIN | (ON_A_CPU if cpu_host.needed() else {})
    options = DSAOptions(indexer_loss_queries=1.0)  # draw nothing, for comparisons
    recipe = getattr(example, f"{arguments.recipe}_config")
    config = recipe(arguments.checkpoint, arguments.data, options=options)
    given = (field.partition("=") for field in arguments.set)
    changes |= {path: ast.literal_eval(text) for path, _, text in given}
    for path, value in changes.items():
        set_field(config, path, value)
    train = getattr(example, arguments.recipe)
    train(config, example.forward_step, callbacks=[example.IndexerMetrics(), moves()])


if __name__ == "__main__":
    main()

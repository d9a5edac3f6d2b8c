"""``examples/bridge_recipes.py`` where there may be no GPU; ``--set`` changes a recipe's fields.

Megatron-Bridge imports packages that need a GPU. Without one, modules stand in for them, whose
names can be imported and subclassed, and which do nothing when they are called.
"""

import argparse
import ast
import functools
import importlib.abc
import importlib.machinery
import runpy
import sys
import types
from typing import Any

import torch

from megatron_dsa.config.model import is_indexer_parameter
from megatron_dsa.config.options import DSAOptions
from megatron_dsa.patches import cpu_host

#: Imported by Bridge, not used in these runs.
STAND_INS = (
    *("transformer_engine", "transformer_engine_torch", "megatron.energon"),
    *("nvidia_resiliency_ext", "modelopt"),
)
#: Layers and arithmetic of the runs to compare with: fp32, without transformer-engine and Apex.
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


class _Nothing(type):
    """Class whose attributes are such classes, and whose calls return ``None``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __call__(cls, *args, **kwargs) -> Any:
        return None if cls.__bases__ == (object,) else super().__call__(*args, **kwargs)


def _nothing(name: str) -> type:
    return _Nothing(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{each}.") for each in STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        """Leave the module empty."""


def stand_in() -> None:
    """Let Bridge be imported without a GPU."""
    cpu_host.activate()
    import megatron_dsa.specs  # noqa: F401  # megatron-core without the stand-ins

    for name in STAND_INS:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Finder())


def start_without_gpu() -> None:
    """Let Bridge's training start without a GPU."""
    from megatron.bridge.training import setup

    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _device: None


def moves() -> Any:
    """Return a callback that prints how many parameters the training moved."""
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
    """Set ``config.a.b`` for a path ``a.b``, which exists."""
    *owners, name = path.split(".")
    for owner in owners:
        config = getattr(config, owner)
    getattr(config, name)
    setattr(config, name, value)


def main() -> None:
    """Run a recipe of the example, with the fields that are given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=("pretrain", "finetune"))
    parser.add_argument("--checkpoint")
    parser.add_argument("--data")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    if cpu_host.needed():
        stand_in()
    example = types.SimpleNamespace(**runpy.run_path("examples/bridge_recipes.py"))
    if cpu_host.needed():
        start_without_gpu()
    changes = PLAIN | (ON_A_CPU if cpu_host.needed() else {})
    options = DSAOptions(indexer_loss_queries=1.0)  # nothing is drawn: other runs can be compared
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

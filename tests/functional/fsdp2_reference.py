"""Losses and gradients of ``examples/fsdp2_dsa.py`` by the package's Megatron path.

``python -m tests.functional.fsdp2_reference FOLDER`` writes a start checkpoint (``hf/``),
first-step gradients (``gradients/``, same format) and all losses (``megatron.json``). ``torchrun
... -m tests.functional.fsdp2_reference FOLDER example`` writes the example's first-step gradients
(``fsdp2.pt``).
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.functional.launch import REPOSITORY, SPARSE

STEPS, BATCH, LENGTH, LEARNING_RATE, COEFFICIENT = 12, 4, 96, 3e-3, 0.7
#: Adam's epsilon. With 1e-8, rounding-only gradients (indexers' biases) move weights by the
#: learning rate and change selections.
EPS = 1e-4
#: A token is a byte; all MLPs are dense.
MODEL = SPARSE | {"vocab_size": 256, "first_k_dense_replace": SPARSE["num_hidden_layers"]}


def example():
    path = REPOSITORY / "examples/fsdp2_dsa.py"
    spec = importlib.util.spec_from_file_location("fsdp2_dsa", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(model, config, global_batch, keep, device) -> list[dict[str, float]]:
    """Train with Megatron's layers and autograd; return the losses.

    ``keep(model)`` is called with the first gradients.
    """
    from megatron_dsa.metrics.log import NAMES, IndexerLog

    IndexerLog.create(config.num_layers, device)
    sums = IndexerLog._state.sums
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, (0.9, 0.95), EPS, weight_decay=0.0
    )
    position, log = torch.arange(LENGTH, device=device)[None], []
    for step in range(STEPS):
        sums.zero_()
        batch = global_batch(step, BATCH, LENGTH).to(device)
        loss = model(batch[:, :-1], position, None, labels=batch[:, 1:]).mean()
        loss.backward()
        if step == 0:
            keep(model)
        optimizer.step()
        optimizer.zero_grad()
        indexer = float(sums[0, :, NAMES.index("indexer loss")].sum()) / COEFFICIENT
        log.append({"lm loss": loss.item(), "indexer loss": indexer})
    return log


def main(folder: Path) -> None:
    from megatron_dsa.extras.huggingface.build import gpt_model, transformer_config
    from megatron_dsa.extras.huggingface.config_json import parse_config
    from megatron_dsa.extras.huggingface.convert import export_model
    from tests.host import start

    start()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = transformer_config(
        parse_config(MODEL), "sparse", params_dtype=torch.float32,
        dsa_indexer_loss_coeff=COEFFICIENT, dsa_indexer_use_sparse_loss=True,
    )  # fmt: skip
    # The example trains the indexer on all query tokens.
    config.dsa = dataclasses.replace(config.dsa, indexer_loss_queries=1.0)
    model = gpt_model(config, MODEL["vocab_size"], LENGTH).to(device).train()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, x in model.named_parameters():
            scale = 0.1 if x.dim() == 1 else 0.08
            x.copy_(torch.randn(x.shape, generator=generator) * scale)
            if "norm" in name and name.endswith("weight"):
                x.add_(1)
    export_model(model, folder / "hf", MODEL)

    def keep(model):
        export_model(model, folder / "gradients", MODEL, values=lambda _name, x: x.grad)

    log = train(model, config, example().global_batch, keep, device)
    (folder / "megatron.json").write_text(json.dumps(log))


def gradients_of_the_example(folder: Path) -> None:
    """Write the first-step gradients, whole, by Hugging Face names."""
    module = example()
    device = module.device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    options = SimpleNamespace(load=folder / "hf", bf16=False, compile=None)
    model = module.sharded_model(options, device)
    batch = module.global_batch(0, BATCH, LENGTH).chunk(dist.get_world_size())[dist.get_rank()]
    module.backward(model, batch.to(device), COEFFICIENT)
    found = {name: x.grad.full_tensor().cpu() for name, x in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(found, folder / "fsdp2.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    (gradients_of_the_example if sys.argv[2:] else main)(Path(sys.argv[1]))

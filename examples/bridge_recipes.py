"""Recipes for Megatron-Bridge: pretraining and fine-tuning of a checkpoint with sparse layers.

    torchrun --nproc-per-node 8 examples/bridge_recipes.py pretrain DeepSeek-V3.2 PREFIX_OF_DATA
    torchrun --nproc-per-node 8 examples/bridge_recipes.py finetune DeepSeek-V3.2 FOLDER_OF_JSONL

A recipe is a function that returns a ``ConfigContainer``, as in ``megatron.bridge.recipes``. The
checkpoint is a folder in Hugging Face's format: DeepSeek-V3, DeepSeek-V3.2 or GLM-5.
"""

import sys

from megatron_dsa.training.launching import use_compiled_dataset_helper

use_compiled_dataset_helper()  # the released wheel has no Makefile for Bridge to run

from megatron.bridge import AutoBridge  # noqa: E402
from megatron.bridge.data.builders import (  # noqa: E402
    ChatSFTPreprocessingConfig,
    GPTSFTDatasetConfig,
)
from megatron.bridge.data.packing import PackedSequenceSpecs  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402

from megatron_dsa.config.options import DSAOptions  # noqa: E402
from megatron_dsa.extras.huggingface.bridge import IndexerMetrics, sparse_provider  # noqa: E402


def pretrain_config(
    checkpoint: str, data: str, sequence_length: int = 4096, options: DSAOptions = DSAOptions()
) -> ConfigContainer:
    """Continue the pretraining of a checkpoint on an indexed data set (``prepare-data``)."""
    dataset = GPTDatasetConfig(
        blend=([data], None), split="99,1,0", seq_length=sequence_length, random_seed=1234,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        dataloader_type="single",
    )  # fmt: skip
    model = sparse_provider(AutoBridge.from_hf_pretrained(checkpoint), options)
    return _config(checkpoint, model, dataset, learning_rate=1e-5)


def finetune_config(
    checkpoint: str, data: str, sequence_length: int = 4096, options: DSAOptions = DSAOptions()
) -> ConfigContainer:
    """Fine-tune a checkpoint on the answers of ``data/training.jsonl``, packed.

    Each line has ``messages``. The loss is the mean over all answer tokens of a global batch.
    """
    dataset = GPTSFTDatasetConfig(
        dataset_root=data, seq_length=sequence_length, do_validation=False, do_test=False,
        preprocessing=ChatSFTPreprocessingConfig(loss_mode="assistant"),
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(packed_sequence_size=sequence_length),
    )  # fmt: skip
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    model = sparse_provider(bridge, options, load_weights=False)  # finetune loads the weights
    model.calculate_per_token_loss = True
    config = _config(checkpoint, model, dataset, learning_rate=5e-6)
    config.checkpoint.pretrained_checkpoint = checkpoint
    return config


def _config(checkpoint: str, model, dataset, learning_rate: float) -> ConfigContainer:
    model.seq_length = dataset.seq_length
    model.dsa_indexer_loss_coeff = 1.0
    model.dsa_indexer_use_sparse_loss = True
    return ConfigContainer(
        model=model,
        dataset=dataset,
        tokenizer=TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=checkpoint
        ),
        train=TrainingConfig(train_iters=1000, global_batch_size=32, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=500, eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=learning_rate, min_lr=0.0, adam_beta2=0.95, weight_decay=0.1,
            clip_grad=1.0, use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=50, start_weight_decay=0.1,
            end_weight_decay=0.1, weight_decay_incr_style="constant",
            override_opt_param_scheduler=True,  # lets a longer run resume
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        logger=LoggerConfig(log_interval=1),
        checkpoint=CheckpointConfig(save="checkpoints", save_interval=100),
        mixed_precision="bf16_mixed",
    )  # fmt: skip


def main() -> None:
    kind, checkpoint, data = sys.argv[1:]
    recipe, train = {
        "pretrain": (pretrain_config, pretrain),
        "finetune": (finetune_config, finetune),
    }[kind]
    # IndexerMetrics adds the indexer loss to Bridge's log.
    train(recipe(checkpoint, data), forward_step, callbacks=[IndexerMetrics()])


if __name__ == "__main__":
    main()

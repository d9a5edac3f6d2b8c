"""A tiny random checkpoint with its tokenizer, text and conversations, for trying commands.

    python examples/tiny_checkpoint.py glm-5 runs/continue_small

writes ``checkpoint/`` (weights and tokenizer as transformers saves them), ``text.jsonl``
(docstrings of Python's standard library) and ``chat.jsonl`` (questions about them). Needs
``transformers``.
"""

import argparse
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SEED = 1
VOCABULARY = 2048
SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{%- for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{%- if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: Modules whose docstrings are the text.
MODULES = (
    *("argparse", "collections", "datetime", "functools", "heapq", "inspect", "itertools"),
    *("json", "math", "os", "pathlib", "random", "re", "shutil", "statistics", "string"),
    *("subprocess", "tarfile", "textwrap", "threading", "typing", "zipfile"),
)
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
    "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 64, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 32, "initializer_range": 0.05, "bos_token_id": None,
    "eos_token_id": 0,
}  # fmt: skip
_MLA = {
    "first_k_dense_replace": 1, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
#: Name -> keys of ``config.json``.
MODELS = {
    "glm-5": _COMMON | _MLA | {"model_type": "glm_moe_dsa"},
    "v3.2": _COMMON | _MLA | {"model_type": "deepseek_v32"},
    "v4": _COMMON
    | {
        "model_type": "deepseek_v4", "intermediate_size": 64, "num_key_value_heads": 1,
        "head_dim": 32, "o_groups": 2, "o_lora_rank": 32, "sliding_window": 32,
        "num_hidden_layers": 4, "hc_mult": 2, "num_nextn_predict_layers": 0,
        "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0,
        "layer_types": ["sliding_attention", "compressed_sparse_attention",
                        "heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    },
}  # fmt: skip


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield names and docstrings of public functions of Python's standard library."""
    for name in MODULES:
        module = importlib.import_module(name)
        for member in sorted(vars(module)):
            text = inspect.getdoc(getattr(module, member))
            if not member.startswith("_") and text and len(text) > 60:
                yield f"{name}.{member}", text


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    wrapped.chat_template = TEMPLATE
    return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    found = list(docstrings())
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.folder / "checkpoint"
    tokenizer_of([text for _, text in found]).save_pretrained(checkpoint)
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(**MODELS[options.model])
    model = AutoModelForCausalLM.from_config(config).float()
    for name, table in model.state_dict().items():
        if name.endswith("tid2eid"):  # transformers leaves this table at zero
            draws = torch.rand(len(table), config.n_routed_experts)
            table.copy_(draws.argsort(1)[:, : table.shape[1]])
    model.save_pretrained(checkpoint)
    rows = {
        "text": [{"text": f"{name}\n{text}"} for name, text in found],
        "chat": [
            {
                "messages": [
                    {"role": "user", "content": f"What does {name} do?"},
                    {"role": "assistant", "content": text.split("\n\n")[0]},
                ]
            }
            for name, text in found
        ],
    }
    for name, lines in rows.items():
        path = options.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{checkpoint}: {options.model}, {len(found)} documents and conversations beside it")


if __name__ == "__main__":
    main()

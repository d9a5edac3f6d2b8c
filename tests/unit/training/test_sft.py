"""Packed conversations: items, and loss and gradients against single conversations."""

from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split
from torch.nn.functional import cross_entropy

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from tests.cases.chat import CONVERSATIONS, TEMPLATES, save_tokenizer, write_rows
from tests.cases.models import gpt
from tests.helpers import relative_error
from tests.host import small_config, small_csa_config, start

pytest.importorskip("transformers")

from megatron_dsa.training import sft
from megatron_dsa.training.chat import ChatTokenizer, Conversation
from megatron_dsa.training.data import _pack, with_room
from megatron_dsa.training.sft import SFTConfig, SFTDataset, pack, tokenise

ROWS = [{"messages": each} for each in CONVERSATIONS.values()]
#: Conversations of many lengths.
MANY = ROWS + [
    {"prompt": "count " * (i % 7), "completion": f"{i} " * (i % 23)} for i in range(1, 60)
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return ChatTokenizer(save_tokenizer(folder, TEMPLATES["deepseek"]))


@pytest.fixture(scope="module")
def build(chat, tmp_path_factory):
    """Return a function that builds the data set of a file with such lines."""

    def make(rows, room, samples=None, part=slice(None), split=Split.train, **settings):
        folder = tmp_path_factory.mktemp("rows")
        path = write_rows(folder / "chat.jsonl", rows)
        config = SFTConfig(
            random_seed=5, sequence_length=room, blend=([path], None), split="1,0,0",
            prefixes={path: tokenise(path, chat, folder)}, **settings,
        )  # fmt: skip
        stored = SFTDataset.build_low_level_dataset(path, config)
        assert SFTDataset.numel_low_level_dataset(stored) == len(rows)
        indices = np.arange(len(rows), dtype=np.int32)[part]
        return SFTDataset(stored, path, indices, samples, split, config)

    return make


def conversations_of(chat, rows):
    """Return tokens, labels and mask of every conversation, encoded separately."""
    found = []
    for row in rows:
        messages = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        (marked,) = chat.encode([Conversation("f:1", messages)])
        ids = [int(~x if x < 0 else x) for x in marked]
        found.append((ids[:-1], ids[1:], [float(x >= 0) for x in marked[1:]]))
    return found


def documents_of(item):
    """Return tokens, labels and mask of every document of an item; check its padding."""
    ends = item["cu_seqlens"].tolist()
    used = ends[-1]
    assert ends == sorted(ends) and ends[0] == 0 and len(ends) == len(item["tokens"]) + 1
    assert not item["labels"][used:].any() and not item["loss_mask"][used:].any()
    if used + 8 < len(item["tokens"]):
        assert len(item["tokens"][used:].unique()) > 1  # padding for more than one expert
    bounds = [(a, b) for a, b in pairwise(ends) if a < b]
    assert item["max_seqlen"] == max(b - a for a, b in bounds)
    for a, b in bounds:
        assert item["position_ids"][a:b].tolist() == list(range(b - a))
        yield tuple(item[name][a:b].tolist() for name in ("tokens", "labels", "loss_mask"))


def test_items_hold_every_conversation_once(build, chat):
    data = build(MANY, 160)
    held = [document for item in data for document in documents_of(item)]
    assert sorted(held) == sorted(conversations_of(chat, MANY))
    filled = sum(len(tokens) for tokens, *_ in held) / (len(data) * 160)
    assert filled > 0.9 and data[0]["loss_mask"].dtype == torch.float32


def test_order_is_of_the_seed(build):
    """The first items must not depend on the requested number: a run resumes."""
    few, many = build(MANY, 160, 3), build(MANY, 160, 40)
    once = len(build(MANY, 160))
    assert len(few) >= 3 and len(many) >= 40 > once
    for index in range(len(few)):
        for name, value in few[index].items():
            assert value.equal(many[index][name]), name
    epochs = [[tuple(many[i]["tokens"].tolist()) for i in range(k, k + once)] for k in (0, once)]
    assert epochs[0] != epochs[1]
    other = build(MANY, 160, 3, split=Split.valid)
    assert any(not few[i]["tokens"].equal(other[i]["tokens"]) for i in range(3))


def test_at_most_so_many_conversations(build):
    for item in build(MANY, 160, documents=3):
        assert len(list(documents_of(item))) <= 3


@pytest.mark.parametrize("most", [None, 2])
def test_packing(most):
    lengths = np.random.default_rng(0).integers(1, 65, 500)
    lists = pack(lengths.tolist(), 64, most)
    assert sorted(chain.from_iterable(lists)) == list(range(500))
    assert max(sum(lengths[i] for i in each) for each in lists) <= 64
    if most:
        assert max(map(len, lists)) == most
    else:
        assert len(lists) * 64 < 1.08 * lengths.sum()
    assert pack([], 8) == [] and pack([8, 8], 8) == [[0], [1]]
    assert pack([5, 6, 2, 3], 8) == [[0, 3], [1, 2]]


def test_conversations_that_are_too_long(build, chat, capsys):
    whole = conversations_of(chat, ROWS)
    lengths = sorted(len(tokens) for tokens, *_ in whole)
    room = lengths[-3]
    data = build(ROWS, room)
    held = [document for item in data for document in documents_of(item)]
    assert sorted(held) == sorted(each for each in whole if len(each[0]) <= room)
    said = f"2 of 6 conversations are longer than --seq-length {room} (the longest: {lengths[-1]})"
    assert f"{said} and are dropped" in capsys.readouterr().out
    data = build(ROWS, room, truncate=True)
    held = [document for item in data for document in documents_of(item)]
    assert sorted(held) == sorted(tuple(part[:room] for part in each) for each in whole)
    assert f"{said} and are truncated; 0 of them have no loss before and are dropped" in (
        capsys.readouterr().out
    )


def test_no_loss_before_the_cut(build, capsys):
    long = {"prompt": "never answered " * 20, "completion": "a"}
    data = build([*ROWS[:1], long], 24, truncate=True)
    assert len(data) == 1 and "1 of them have no loss before" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--split gives the train data no conversation of"):
        build([long], 24)
    with pytest.raises(ConfigError, match="--split gives the valid data no conversation of"):
        build(ROWS, 200, 4, part=slice(0, 0), split=Split.valid)


def test_signs_of_life(chat, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sft, "_BEAT", 0)
    monkeypatch.setattr(sft, "_TOGETHER", 2)
    beats: list = []
    path = write_rows(tmp_path / "chat.jsonl", ROWS)
    tokenise(path, chat, tmp_path, lambda: beats.append(1))
    assert len(beats) == 3 and f"{path}: 4 conversations tokenised" in capsys.readouterr().out


def test_files_of_tokens(chat, tmp_path, capsys):
    """Written once per content and template; a wrong line must leave nothing behind."""
    path = write_rows(tmp_path / "chat.jsonl", ROWS)
    first = tokenise(path, chat, tmp_path / "cache")
    said = capsys.readouterr().out
    tokens = sum(len(tokens) + 1 for tokens, *_ in conversations_of(chat, ROWS))
    assert f"{path}: 6 conversations of {tokens} tokens" in said
    assert "[[A permission.<eos>]]" in said
    assert f"of which only the end is trained; the first is {path}:5" in said
    assert tokenise(path, chat, tmp_path / "cache") == first
    assert "tokens of an earlier run" in capsys.readouterr().out
    write_rows(path, ROWS[:2])
    assert tokenise(path, chat, tmp_path / "cache") != first
    before = sorted((tmp_path / "cache").iterdir())
    write_rows(path, [*ROWS, {"messages": []}])
    with pytest.raises(ConfigError, match=f"{path}:7: messages"):
        tokenise(path, chat, tmp_path / "cache")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no conversation"):
        tokenise(str(tmp_path / "empty.jsonl"), chat, tmp_path / "cache")
    with pytest.raises(ConfigError, match="there is no file"):
        tokenise(str(tmp_path / "none.jsonl"), chat, tmp_path / "cache")
    assert sorted((tmp_path / "cache").iterdir()) == before
    config = SimpleNamespace(prefixes={path: str(tmp_path / "elsewhere")})
    with pytest.raises(ConfigError, match="--data-cache-path"):
        SFTDataset.build_low_level_dataset(path, config)


@pytest.mark.parametrize("part", [slice(None), slice(0)], ids=["some", "none"])
def test_a_part_that_nothing_is_read_from(part, build):
    """``--eval-iters 0``: Megatron's samplers reject an empty data set."""
    data = build(ROWS, 96, samples=0, part=part, split=Split.valid)
    assert len(data) == 1
    if part == slice(0):
        assert not any(data[0][name].any() for name in ("tokens", "loss_mask", "cu_seqlens"))
    else:
        assert len(list(documents_of(data[0]))) == 1


def test_turns_without_an_end_are_warned_of(tmp_path, capsys):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    chat = ChatTokenizer(save_tokenizer(tmp_path), template)
    tokenise(write_rows(tmp_path / "chat.jsonl", ROWS), chat, tmp_path / "cache")
    turns = sum(
        each["role"] == "assistant" and index + 1 < len(messages)
        for messages in CONVERSATIONS.values()
        for index, each in enumerate(messages)
    )
    assert f"no special token ends {turns} turns of the assistant" in capsys.readouterr().out


MODELS = {
    "V3.2, sparse": (small_config, (), DSAOptions()),
    "V3.2, masked": (small_config, (), DSAOptions(selected_attention="masked")),
    "V3.2, warm-up": (small_config, (), DSAOptions(stage="warmup", freeze_main=False)),
    "V3.2, dense": (small_config, (), DSAOptions(stage="dense")),
    "V4": (small_csa_config, (4,), DSAOptions()),
}


def sum_and_gradients(model, batches):
    """Return the summed loss of all tokens, and its gradients with the indexers'."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch, params in batches:
        # Logits, because the loss of Megatron's models is in fp32.
        logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)
        chosen = batch["loss_mask"].flatten() > 0
        labels = batch["labels"].flatten()[chosen]
        loss = cross_entropy(logits.flatten(0, 1)[chosen], labels, reduction="sum")
        loss.backward()
        total += loss.detach().cpu()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return total, gradients


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("fixed", [False, True], ids=["any size", "one size"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_is_one_by_one(name, fixed, batch_size, build, chat):
    """In fp64, with the loss summed per token, like --calculate-per-token-loss."""
    make, arguments, options = MODELS[name]
    settings = {"dsa_indexer_use_sparse_loss": False} if options.stage != "sparse" else {}
    config = make(
        *arguments, options=options, calculate_per_token_loss=True, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, **settings,
    )  # fmt: skip
    model = gpt(config, vocabulary=320)
    rows = [{"prompt": "a " * (i % 5), "completion": "so " * (i % 4 + 1)} for i in range(9)]
    rows.append({"messages": CONVERSATIONS["empty answer"]})
    alone = []
    for tokens, labels, mask in conversations_of(chat, rows):
        batch = {
            "tokens": torch.tensor([tokens]), "labels": torch.tensor([labels]),
            "loss_mask": torch.tensor([mask]), "position_ids": torch.arange(len(tokens))[None],
        }  # fmt: skip
        alone.append(({key: value.to(start()) for key, value in batch.items()}, None))
    want, expected = sum_and_gradients(model, alone)

    data, packed = build(rows, 64), []
    assert len(data) == 2 or len(data) == 3
    items = [data[i] for i in range(len(data))]
    assert any(item["cu_seqlens"][-1] < 64 for item in items)
    if len(items) % batch_size:  # an item of padding only
        assert batch_size == 2
        items.append({key: torch.zeros_like(value) for key, value in items[0].items()})
    for chosen in zip(*[iter(items)] * batch_size, strict=True):
        batch = torch.utils.data.default_collate(list(chosen))
        if fixed:
            batch["cu_seqlens"] = with_room(batch["cu_seqlens"], 12)
        batch = {key: value.to(start()) for key, value in batch.items()}
        packed.append((batch, _pack(batch, 64, fixed=fixed, padded=True)))
    got, gradients = sum_and_gradients(model, packed)
    assert got.item() == pytest.approx(want.item(), rel=1e-12) and set(gradients) == set(expected)
    if options.stage != "dense":
        assert sum(".indexer." in x and bool(g.any()) for x, g in gradients.items()) >= 4
    for key, gradient in expected.items():
        assert relative_error(gradients[key], gradient) < 1e-9, key


def test_damaged_tokens_of_an_earlier_run_are_written_anew(chat, tmp_path, capsys):
    path = write_rows(tmp_path / "chat.jsonl", ROWS)
    prefix = tokenise(path, chat, tmp_path)
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").unlink()
    assert tokenise(path, chat, tmp_path) == prefix and Path(f"{prefix}.bin").read_bytes() == whole
    assert "of an earlier run" not in capsys.readouterr().out
    tokenise(path, chat, tmp_path)
    assert "of an earlier run" in capsys.readouterr().out

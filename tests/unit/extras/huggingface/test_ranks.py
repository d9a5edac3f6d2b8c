"""Slices of a checkpoint for the ranks of a parallel model, without processes."""

import argparse
import json
import re
from itertools import chain

import pytest
import torch
from torch.distributed.checkpoint import save

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.convert import export_model, import_model, model_tensors
from megatron_dsa.extras.huggingface.names import HYPER_CONNECTIONS, PREDICTION, V3, V4, Split
from megatron_dsa.extras.huggingface.ranks import ParallelRank, assemble, global_name, part
from tests.tiny_models import tiny_config, tiny_model, tiny_v4

pytest.importorskip("safetensors")


def full_tensors(entry, seed=0):
    """Draw tensors of a shape that 4 ranks can share, different per part."""
    generator = torch.Generator().manual_seed(seed)
    shape = (8,) if "norm" in entry.hf[0] or "bias" in entry.hf[0] else (16, 12)
    return [torch.randn(shape, generator=generator) for _ in entry.hf]


@pytest.mark.parametrize("splits_latents", [True, False], ids=["local", "transformer-engine"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_all_ranks_make_the_full_tensors(size, splits_latents):
    other = 2 if size == 4 else size
    tables = [table for names in (V3, V4) for table in (names.model, names.layer, names.mtp)]
    for entry in chain(*tables):
        full = full_tensors(entry)
        places = [
            ParallelRank(
                tensor=(rank, size),
                expert_tensor=(rank % other, other),
                splits_latents=splits_latents,
            )
            for rank in range(size)
        ]
        ranks = places[0].shard(entry)[1]
        pieces = [
            torch.cat([x[part(entry, x.shape, parallel_rank)] for x in full], dim=entry.join)
            for parallel_rank in places[:ranks]
        ]
        latent = entry.split is Split.LATENT
        whole = entry.split in (Split.WHOLE, Split.TABLE)
        split = size > 1 and not whole and (splits_latents or not latent)
        assert ranks == (1 if not split else other if entry.is_expert else size)
        assert all(x.numel() * ranks == sum(y.numel() for y in full) for x in pieces)
        for ours, theirs in zip(assemble(entry, pieces), full, strict=True):
            assert torch.equal(ours, theirs)


def test_gate_and_up_are_split_one_by_one():
    """Megatron splits a rank's part into gate and up."""
    entry = V3.match("decoder.layers.0.mlp.linear_fc1.weight", 1).entry
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]
    parallel_rank = ParallelRank(tensor=(1, 2))
    ours = torch.cat([x[part(entry, x.shape, parallel_rank)] for x in (gate, up)])
    assert ours.flatten().tolist() == [2.0, 3.0, 12.0, 13.0]


@pytest.mark.parametrize(("names", "config"), [(V3, tiny_config), (V4, tiny_v4)], ids=["v3", "v4"])
def test_table_splits_as_megatron_does(names, config):
    plain = tiny_model(config(num_nextn_predict_layers=1), mtp_num_layers=1)
    whole = tiny_model(config(), features=names.features.keys() - {PREDICTION})
    dims = {Split.COLUMNS: 1, Split.WHOLE: None}
    for name, tensor in chain(model_tensors(plain), model_tensors(whole)):
        split = getattr(tensor, "tensor_model_parallel", False)
        expected = dims.get(names.match(name, 2).entry.split, 0)
        assert (tensor.partition_dim if split else None) == expected, name


def test_layers_and_experts_are_numbered_as_in_the_whole_model():
    parallel_rank = ParallelRank(expert=(1, 4), first_layer=6, num_experts=16)
    layer = "decoder.layers.2.mlp.experts."
    for local, whole in (
        (f"{layer}linear_fc1.weight3", "decoder.layers.8.mlp.experts.linear_fc1.weight7"),
        (
            f"{layer}local_experts.0.linear_fc2.weight",
            "decoder.layers.8.mlp.experts.local_experts.4.linear_fc2.weight",
        ),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight",) * 2,
        ("mtp.layers.0.eh_proj.weight",) * 2,
    ):
        if local == whole and "decoder" in local:
            whole = local.replace("layers.0", "layers.6")
        assert global_name(local, parallel_rank) == whole


def test_uneven_shares_are_refused():
    entry = V3.match("decoder.layers.0.mlp.linear_fc2.weight", 1).entry
    with pytest.raises(ConfigError, match=r"dim 1 of \(8, 9\) is no multiple of the 2"):
        part(entry, (8, 9), ParallelRank(tensor=(0, 2)))
    with pytest.raises(ConfigError, match=r"num_experts \(6\) must be a multiple"):
        ParallelRank(expert=(0, 4), num_experts=6)
    with pytest.raises(ConfigError, match="0 <= rank < size"):
        ParallelRank(tensor=(2, 2))


class Shell(torch.nn.Module):
    """One rank's parameters of a parallel model, by Megatron's local names."""

    pre_process = post_process = False

    def __init__(self, config, shapes):
        super().__init__()
        self.config = config
        self._tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def state_dict(self, keep_vars=False):
        return self._tensors


@pytest.mark.parametrize(
    ("names", "config", "features"),
    [(V3, tiny_config, ()), (V4, tiny_v4, ()), (V4, tiny_v4, [HYPER_CONNECTIONS])],
    ids=["v3", "v4, plain", "v4"],
)
def test_every_rank_of_a_grid_is_filled_with_its_slices(names, config, features, tmp_path):
    config = config()
    model = tiny_model(config, features=features)
    export_model(model, tmp_path, config, shard_bytes=40_000)
    whole = dict(model_tensors(model))
    pieces, entries = {}, {}
    for tensor_rank in range(2):
        for expert_rank in range(2):
            parallel_rank = ParallelRank(
                (tensor_rank, 2), (0, 1), (expert_rank, 2), first_layer=1, num_experts=8
            )
            shapes = {}
            for name, tensor in whole.items():
                local, entry = local_name(name, parallel_rank), names.match(name, 2).entry
                if local is not None:
                    dim, size = int(entry.split is Split.COLUMNS), parallel_rank.shard(entry)[1]
                    shapes[local] = list(tensor.shape)
                    shapes[local][dim] //= size
            shell = Shell(model.config, shapes)
            import_model(shell, tmp_path, parallel_rank)
            for local, tensor in shell.state_dict().items():
                name = global_name(local, parallel_rank)
                entries[name] = names.match(name, 2).entry
                pieces.setdefault(name, {})[parallel_rank.shard(entries[name])[0]] = tensor
    assert len(pieces) == sum("layers.0." not in name for name in whole)
    for name, by_rank in pieces.items():
        together = assemble(entries[name], [by_rank[rank] for rank in sorted(by_rank)])
        assert torch.equal(torch.cat(together), whole[name]), name


def local_name(name, parallel_rank):
    """Return the second stage's name of a parameter; None if another rank has it."""
    if name.startswith("decoder.layers.0."):
        return None
    name = re.sub(r"(decoder\.layers\.)(\d+)", lambda x: f"{x[1]}{int(x[2]) - 1}", name)
    if ".local_experts." in name:
        before, after = name.split(".local_experts.")
        number, rest = after.split(".", 1)
        if int(number) // 4 != parallel_rank.expert[0]:
            return None
        name = f"{before}.local_experts.{int(number) % 4}.{rest}"
    return name


def test_padding_of_the_vocabulary_is_shared_too(tmp_path):
    config = tiny_config()
    model = tiny_model(config)
    export_model(model, tmp_path, config)
    name = "output_layer.weight"
    for rows, rank, words in ((20, 3, 10), (30, 2, 10), (30, 3, 0)):
        shell = Shell(model.config, {name: (rows, 32)})
        ours = shell.state_dict()[name].fill_(7)
        import_model(shell, tmp_path, ParallelRank(tensor=(rank, 4)))
        start = rank * rows
        assert torch.equal(ours[:words], model.output_layer.weight[start : start + words])
        assert not ours[words:].any()


def test_training_run_starts_from_a_checkpoint(tmp_path, capsys, monkeypatch):
    from megatron_dsa.extras.huggingface.load_hf import importing_hook, parallel_rank_of

    config = tiny_config("deepseek_v3")
    model = tiny_model(config, "dense")
    export_model(model, tmp_path, config)
    other = tiny_model(tiny_config(), seed=6)
    assert parallel_rank_of(other) == ParallelRank(num_experts=8)
    args = argparse.Namespace(
        load=str(tmp_path),
        pretrained_checkpoint=None,
        ckpt_step=None,
        dsa_load_hf=str(tmp_path),
        dsa_hf_without=[],
    )
    tokenizer = argparse.Namespace(vocab_size=71)
    monkeypatch.setattr("megatron_dsa.extras.huggingface.load_hf.get_tokenizer", lambda: tokenizer)
    with pytest.raises(ConfigError, match=r"the tokenizer has 71 tokens, .* has weights for 70"):
        importing_hook(args)([other])
    tokenizer.vocab_size = 70
    assert importing_hook(args)([other]) == [other]
    assert "has no indexers: 10 tensors keep their initial values" in capsys.readouterr().out
    weight = model.decoder.layers[1].mlp.router.weight
    assert torch.equal(other.decoder.layers[1].mlp.router.weight, weight)

    with torch.no_grad():
        weight_of_run = other.decoder.layers[1].mlp.router.weight.fill_(3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    save({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "iter_0000004", no_dist=True)
    metadata = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (tmp_path / "iter_0000004" / "metadata.json").write_text(json.dumps(metadata))
    importing_hook(args)([other])
    assert (weight_of_run == 3).all() and "--dsa-load-hf is not" in capsys.readouterr().out

    model.decoder.layers[0].layer_number = 7  # of a later pipeline stage
    assert parallel_rank_of(model).first_layer == 6

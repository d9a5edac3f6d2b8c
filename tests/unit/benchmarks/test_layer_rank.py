"""One of several tensor-parallel ranks in the family ``layer``: its share of the work, its bits."""

import dataclasses
import inspect

import pytest
import torch

from benchmarks import layer
from benchmarks.layer import Case, peers, rank
from benchmarks.megatron_layer import layer_config
from benchmarks.settings import Settings, Work
from megatron_dsa.ops.dispatch import Operation
from megatron_dsa.ops.masked_attention.spec import unpack
from tests import host

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are for the CPU")

CPU = torch.device("cpu")
RANKS, RANK, TOKENS, TOPK = 8, 4, 128, 12
OWN = TOKENS // RANKS
CASE = Case("tiny", TOKENS, heads=4, workspace_mib=1)


@pytest.fixture
def groups():
    """Groups of one process before, none of the benchmark's after."""
    host.stop()
    yield
    host.stop()


@pytest.fixture
def calls(monkeypatch):
    """Arguments of all dispatched calls, by operation."""
    found: dict[str, list] = {}
    run = Operation.run

    def recorded(self, call, policy, *args, **kwargs):
        found.setdefault(self.name, []).append((call, args))
        return run(self, call, policy, *args, **kwargs)

    monkeypatch.setattr(Operation, "run", recorded)
    return found


def scored(found) -> tuple[int, int]:
    """Query tokens that were scored, and pairs of them with the keys that they see."""
    seen = [args[-1] for _, args in found["indexer_scores"]]
    pairs = sum(int((s.end - s.start).sum()) for s in seen)
    return sum(len(s.end) for s in seen), pairs


def test_a_rank_has_its_share_of_the_indexer_and_all_tokens_of_its_heads(groups, calls):
    with rank.one_rank_of(RANKS) as build:
        built, remark = build("masked-rank", CASE.of_all_ranks(), CPU)
        assert remark == "rank 4 of 8" and built.x.shape == (OWN, 1, 32)
        given = []
        built.module.core_attention.indexer.register_forward_hook(
            lambda _module, _args, inputs: given.append(inputs)
        )
        built.step()
    (inputs,) = given
    assert len(inputs.queries.latent) == OWN and inputs.queries.heads == 3
    assert inputs.queries.dim == 16 and inputs.k.shape == (TOKENS, 16)
    # Half of its tokens is scored by another rank, and half of another's here: exactly the mean.
    assert scored(calls) == (OWN, TOKENS * (TOKENS + 1) // 2 // RANKS)
    ((_, (loss,)),) = calls["sparse_indexer_loss"]
    assert loss.indices.shape == loss.teacher.shape == (OWN, TOPK)
    for name in ("masked_attention_forward", "masked_attention_backward"):
        ((call, (attended, *_)),) = calls[name]
        assert call.heads == 4 and attended.q.shape == (TOKENS, 4, 20)
        assert attended.kv.shape == (TOKENS, 4, 22)
    q_down, kv_down = (
        getattr(built.module, f"linear_{name}_down_proj").weight for name in ("q", "kv")
    )
    assert q_down.shape == (24, 32) and kv_down.shape == (16 + 8, 32)
    assert built.module.linear_proj.weight.shape == (32, 4 * 10)
    assert all(p.grad is not None and p.grad.norm() > 0 for p in built.module.parameters())


def test_by_heads_one_process_does_all_of_the_indexer(groups, calls):
    """What the other ways with these heads stand for."""
    host.start()
    built, _ = peers.build("masked", CASE.spec(), CPU)
    built.step()
    ((_, (loss,)),) = calls["sparse_indexer_loss"]
    assert loss.indices.shape == (TOKENS, TOPK)
    # The first queries select all keys that they see, without scores.
    assert scored(calls) == (TOKENS - TOPK, (TOKENS * (TOKENS + 1) - TOPK * (TOPK + 1)) // 2)


def test_bits_of_all_tokens_are_causal_and_full(groups, calls):
    with rank.one_rank_of(RANKS) as build:
        build("masked-rank", CASE.of_all_ranks(), CPU)[0].step()
    masks = [
        unpack(calls[f"masked_attention_{name}"][0][1][0].bits, TOKENS)
        for name in ("forward", "backward")
    ]
    assert masks[0].equal(masks[1])
    mask, position = masks[0], torch.arange(TOKENS)
    assert not mask.triu(1).any()
    assert mask.sum(1).tolist() == (position + 1).clamp_max(TOPK).tolist()
    # The rank's own lists stand at their place; the loss has the same ones, with their teacher.
    ((_, (loss,)),) = calls["sparse_indexer_loss"]
    own = mask[RANK * OWN : (RANK + 1) * OWN]
    assert own.nonzero()[:, 1].view(OWN, TOPK).tolist() == loss.indices.tolist()
    # Others differ, as those of other tokens do.
    assert not mask[-OWN:].equal(own)


def test_lists_that_come_back_are_of_keys_that_are_visible(groups, calls):
    with rank.one_rank_of(RANKS) as build:
        build("sparse-rank", CASE.of_all_ranks(), CPU)[0].step()
    ((call, (given,)),) = calls["sparse_attention_forward"]
    assert call.heads == 32 and given.q.shape == (OWN, 32, 16 + 8)
    last = torch.arange(RANK * OWN, (RANK + 1) * OWN)[:, None]
    assert (given.indices >= 0).all() and (given.indices <= last).all()
    assert given.indices.diff(dim=1).gt(0).all()


def test_what_a_rank_sends_is_counted(groups):
    measurer = layer._Measurer(CASE, CPU, Settings("cpu", repeats=1))
    results = dict(measurer.measure(Work("step", "masked-rank")))
    assert results["forward"]["status"] == results["step"]["status"] == "ok"
    assert results["step"]["ran"].startswith("rank 4 of 8; ")
    assert "tensor_parallel_attention=select" in results["step"]["ran"]
    assert results["step/collectives"]["ms"] > 0
    narrow, wide, words = 2, 4, 4
    # Latents of queries and keys, the rope key: forward, back as gradients; latents once more for
    # the gradients of the up projections. Output and its gradient. Index keys, with fp32 gradients.
    gathered = (3 * (24 + 16) + 2 * 8 + 2 * 32) * narrow + 16 * (narrow + wide)
    gathered += 2 * words * 4 + TOPK * wide  # bits, twice; the teacher
    # Index queries and weights of half of the tokens leave, and lists.
    exchanged = OWN // 2 * (3 * (16 + 1) * narrow + TOPK * 4)
    assert results["step"]["sent_bytes"] == (RANKS - 1) * OWN * gathered + exchanged


def test_dense_attention_of_a_rank(groups, calls, monkeypatch):
    measurer = layer._Measurer(CASE, CPU, Settings("cpu", repeats=1))
    results = dict(measurer.measure(Work("step", "dense-rank")))
    assert results["step"]["status"] == "ok" and "out_error" not in results["step"]
    assert "indexer_scores" not in results["step"]["ran"] and not calls.get("sparse_indexer_loss")
    gathered = (3 * (24 + 16) + 2 * 8 + 2 * 32) * 2
    assert results["step"]["sent_bytes"] == (RANKS - 1) * OWN * gathered
    assert {call.heads for call, _ in calls["dense_attention"]} == {4}
    # On a GPU the fastest attention is chosen for the heads of a rank.
    asked = []

    def fastest(*arguments):
        asked.append(arguments)
        return "fastest", None

    monkeypatch.setattr(peers, "fastest_attention", fastest)
    with rank.one_rank_of(RANKS):
        spec = dataclasses.replace(CASE.of_all_ranks(), tp=RANKS)
        peers.dense_module(layer_config(spec), torch.device("cuda"))
    assert asked == [(4, 20, 10, torch.device("cuda"))]


def test_other_ways_follow(groups):
    """Groups and collectives are the process's own again."""
    names = list(rank.STAND_INS)
    before = [getattr(torch.distributed, name) for name in names]
    measurer = layer._Measurer(CASE, CPU, Settings("cpu", repeats=1))
    for way in ("sparse-rank", "ours", "masked-rank", "bundled"):
        results = dict(measurer.measure(Work("step", way)))
        assert results["step"]["status"] == "ok", way
        assert ("sent_bytes" in results["step"]) == way.endswith("-rank")
        assert ("out_error" in results["step"]) == (way == "bundled")
    assert [getattr(torch.distributed, name) for name in names] == before


def test_stand_ins_have_the_arguments_of_torch():
    for name, copy in rank.STAND_INS.items():
        ours = [p for p in inspect.signature(copy).parameters if not p.startswith("_")]
        theirs = list(inspect.signature(getattr(torch.distributed, name)).parameters)
        assert [p for p in theirs if p in ours] == ours


def test_heads_say_how_many_ranks_there_are():
    assert [Case("v3.2", 4096, heads=heads).ranks for heads in (128, 64, 16, 24, None)] == [
        1, 2, 8, 1, 1
    ]  # fmt: skip
    spec = Case("v3.2", 4096, heads=16).of_all_ranks()
    assert (spec.heads, spec.tokens, spec.sequence_length) == (128, 4096, 4096)


def test_kernels_are_compiled_without_other_ranks():
    """Building a layer calls the gather without a group, before any bits are drawn."""
    bits = torch.arange(6, dtype=torch.int32).view(3, 2)
    assert rank.KeyBits(2, 1).gather(bits, None) is bits

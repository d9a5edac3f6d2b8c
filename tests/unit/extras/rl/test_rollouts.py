"""Records of SGLang and vLLM, replayed and compared; written here."""

import base64
import io
import re

import numpy as np
import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.rl.agreement import compare_selections, lines
from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay
from megatron_dsa.extras.rl.rollouts import (
    EngineRecord,
    experts_of,
    read_sglang,
    read_vllm,
    record_layers,
    selections_of,
)
from megatron_dsa.ops.dispatch import report, reset_report
from tests.cases.models import MODELS, SELECTING, gpt, tokens
from tests.host import small_config, small_csa_config

FIELD = "indexer_topk"


def sglang_json(values, field=FIELD, dtype=None):
    """Return the JSON of ``/generate``: raw numbers in base64; ``values [tokens, layers, K]``."""
    data = np.ascontiguousarray(values, dtype or np.int32)
    meta = {field: base64.b64encode(data.tobytes()).decode(), "prompt_tokens": 3}
    return {"text": "", "meta_info": meta | ({f"{field}_dtype": dtype} if dtype else {})}


def vllm_json(values, field=FIELD, dtype=np.int32):
    """Return a choice of ``/v1/completions``: a ``.npy`` file in base64."""
    file = io.BytesIO()
    np.save(file, np.asarray(values, dtype))
    return {"index": 0, "text": "", field: base64.b64encode(file.getvalue()).decode()}


def model_of(kind):
    config, arguments, changes = MODELS[kind]
    return gpt(config(*arguments, **changes))


def logits(model, seed):
    ids = tokens(seed)
    return model(ids, torch.arange(64)[None], None)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_whole_loop(kind, engine):
    """Record, write like the engine, read, compare, replay: exact, except for the last token, which
    the engine did not run.
    """
    model = model_of(kind).eval()
    capture = IndexCapture()
    with torch.no_grad(), capture.on(model):
        wanted = logits(model, 1)
    (captured,) = capture.microbatches
    count, columns = record_layers(model.config, engine)
    assert sorted(columns) == SELECTING[kind]
    # Other columns are not read.
    values = np.full((63, count, model.config.dsa_indexer_topk), 10_000)
    for layer, column in columns.items():
        values[:, column] = captured[layer][:63]
    if engine == "sglang":
        record = read_sglang(sglang_json(values), FIELD, count, values.shape[2])
    else:
        record = read_vllm(vllm_json(values), FIELD)
    ratio = 4 if kind == "hybrid" else 1
    given = selections_of([record], [64], columns, ratio=ratio)
    found = compare_selections(given, captured, rank=2)
    assert [x.layer for x in found] == SELECTING[kind]
    for each in found:
        # The last token's keys are the latest ones.
        assert each.differing == 1 and each.first == 63 and each.rank == 2
        seen = 64 // ratio
        latest = set(range(max(seen - values.shape[2], 0), seen))
        own = set(captured[each.layer][63].tolist())
        assert each.keys - each.common == len(latest - own)
        assert set(each.recorded_only) <= latest - own and set(each.selected_only) <= own - latest
    reset_report()
    with torch.no_grad(), IndexReplay([given]).on(model):
        replayed = logits(model, 1)
    assert "indexer_topk" not in report()
    assert torch.equal(replayed[:, :63], wanted[:, :63])
    assert not torch.equal(replayed[:, 63], wanted[:, 63])


def record(length, layers=2, width=3, first=0):
    """Return a record whose entries encode sequence, token and layer."""
    values = torch.arange(length)[:, None, None] * 100 + torch.arange(layers)[:, None] * 10
    return EngineRecord((values + torch.arange(width) + first).int())


def test_packed_sequences_with_padding():
    records = [record(4, first=1000), record(3, first=2000)]
    made = selections_of(records, [5, 3], {7: 1}, padded_lengths=[8, 4])[7]
    assert made.dtype == torch.int32 and made.shape == (12, 3)
    assert made[:4, 0].tolist() == [1010, 1110, 1210, 1310]
    assert made[4].tolist() == [2, 3, 4]  # the latest keys of the last of 5 tokens
    assert (made[5:8] == -1).all() and (made[11] == -1).all()
    assert made[8:11, 0].tolist() == [2010, 2110, 2210]


def test_alternating_sequences():
    records = [record(4, first=1000), record(4, first=2000)]
    made = selections_of(records, [4, 4], {1: 0}, alternating=True)[1]
    assert made[:, 0].tolist() == [1000, 2000, 1100, 2100, 1200, 2200, 1300, 2300]


def test_the_last_token_of_compressed_keys():
    made = selections_of([record(6)], [7], {1: 0}, ratio=4)[1]
    assert made[6].tolist() == [0, -1, -1]
    assert selections_of([record(2)], [3], {1: 0}, ratio=4)[1][2].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("dtype", ["int32", "uint16", "uint8"])
def test_routed_experts(dtype):
    values = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 7
    one = read_sglang(sglang_json(values, "routed_experts", dtype), "routed_experts", 3, 2)
    other = read_vllm(vllm_json(values, "routed_experts", dtype), "routed_experts")
    for given in (one, other):
        made = experts_of([given], [6], {2: 1, 3: 2}, padded_lengths=[7])
        assert sorted(made) == [2, 3] and made[2].dtype == torch.int64
        assert torch.equal(made[3][:5], torch.from_numpy(values[:, 2]))
        assert made[3][5:].tolist() == [[0, 1], [0, 1]]


def test_megatron_replays_the_experts():
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    try:
        routers = [RouterReplay(), RouterReplay()]
        values = torch.randint(0, 8, (9, 2, 1)).numpy()
        made = experts_of([read_vllm(vllm_json(values, "routed_experts"), "routed_experts")], [9],
                          {1: 0, 2: 1})  # fmt: skip
        RouterReplay.set_replay_data([made[layer] for layer in sorted(made)])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        scores = torch.rand(9, 8)
        for layer, router in enumerate(routers):
            probabilities, chosen = router.get_replay_topk(scores, 1)
            assert torch.equal(chosen, torch.from_numpy(values[:, layer]).long())
            assert torch.equal(probabilities, scores.gather(1, chosen))
    finally:
        RouterReplay.clear_global_router_replay_instances()


def test_columns():
    shared = small_config(num_layers=4, dsa_indexer_topk_freq=2)
    assert record_layers(shared, "sglang") == (4, {1: 0, 3: 2})
    assert record_layers(shared, "vllm") == (2, {1: 0, 3: 1})
    hybrid = small_config(
        num_layers=8, layer_pattern="D-D-D-D-", is_hybrid_model=True, dsa_indexer_topk_freq=2
    )
    assert record_layers(hybrid, "sglang") == (4, {1: 0, 5: 2})
    v4 = small_csa_config(4, num_layers=5, csa_compress_ratios=[4, 0, 4, 6, 4])
    for engine in ("sglang", "vllm"):
        assert record_layers(v4, engine) == (3, {1: 0, 3: 1, 5: 2})
    with pytest.raises(ConfigError, match="engine must be sglang or vllm"):
        record_layers(v4, "tensorrt")


def test_wrong_records_are_refused_by_name():
    good = sglang_json(np.zeros((4, 2, 3)))
    cases = {
        "meta_info.indexer_topk is missing: start the server with --enable-return-indexer-topk":
            lambda: read_sglang({"meta_info": {}}, FIELD, 2, 3),
        "meta_info.indexer_topk must hold 5 layers of 3 entries":
            lambda: read_sglang(good, FIELD, 5, 3),
        "meta_info.indexer_topk must be base64":
            lambda: read_sglang({"meta_info": {FIELD: "?"}}, FIELD, 2, 3),
        "meta_info.routed_experts_dtype must be one of": lambda: read_sglang(
            sglang_json(np.zeros((4, 2, 3)), "routed_experts", "int64"), "routed_experts", 2, 3
        ),
        "choice.routed_experts is missing: start the server with --enable-return-routed-experts":
            lambda: read_vllm({}, "routed_experts"),
        "choice.indexer_topk must be base64 of a .npy file":
            lambda: read_vllm({FIELD: base64.b64encode(b"no array").decode()}, FIELD),
        "choice.indexer_topk must be integers [tokens, layers, K]":
            lambda: read_vllm(vllm_json(np.zeros((4, 2))), FIELD),
        "records[0] must have 4 or 5 tokens": lambda: selections_of([record(3)], [5], {1: 0}),
        "records[0] must begin with the first token": lambda: selections_of(
            [EngineRecord(record(4).values, 2)], [5], {1: 0}
        ),
        "columns must be below the 2 layers": lambda: selections_of([record(4)], [5], {1: 2}),
        "records must agree in layers and width": lambda: selections_of(
            [record(4), record(4, width=5)], [5, 5], {1: 0}
        ),
        "must have one entry per sequence": lambda: selections_of([record(4)], [5, 5], {1: 0}),
        "must have equal lengths": lambda: selections_of(
            [record(4), record(3)], [4, 3], {1: 0}, alternating=True
        ),
    }  # fmt: skip
    for message, call in cases.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            call()


def test_no_pickle_is_read():
    """Records come over the network."""
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"must be base64 of a \.npy file"):
        read_vllm({FIELD: base64.b64encode(file.getvalue()).decode()}, FIELD)


def test_lines_name_layer_rank_and_token():
    a = torch.tensor([[0, 1, -1], [3, 1, 2], [4, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    b = torch.tensor([[1, 0], [1, 2], [4, -1], [5, -1]], dtype=torch.int32)
    found = compare_selections({3: a, 5: a}, {3: b, 5: a}, rank=1)
    text = list(lines(found))
    assert text[0].startswith("layer 3, rank 1: 83.333% of 6 keys agree; 1 of 3 tokens differ")
    assert "first token 1: recorded only 3, selected only none" in text[0]
    assert text[1:] == ["91.667% of 12 recorded keys are selected"]


def test_a_rank_has_some_of_the_tokens():
    recorded = torch.arange(12, dtype=torch.int32)[:, None]
    mine = torch.tensor([8, 3, 9])
    selected = recorded[mine].clone()
    selected[2] = 5
    (one,) = compare_selections({1: recorded}, {1: selected}, tokens=mine, workspace_bytes=1)
    assert (one.first, one.recorded_only, one.selected_only) == (9, (9,), (5,))
    assert one.share == pytest.approx(2 / 3) and one.tokens == 3
    with pytest.raises(ConfigError, match="one row for each of the 3 tokens"):
        compare_selections({1: recorded}, {1: selected})
    with pytest.raises(ConfigError, match=r"layer\(s\) 1 missing"):
        compare_selections({2: recorded}, {1: selected})


@pytest.mark.parametrize("number, dtype", [(2**32 + 3, "int64"), (2**31, "uint32")])
def test_numbers_of_more_than_32_bits(number, dtype):
    buffer = io.BytesIO()
    np.save(buffer, np.full((2, 1, 1), number, dtype))
    text = base64.b64encode(buffer.getvalue()).decode()
    with pytest.raises(ConfigError, match=f"indexer_topk must hold numbers of 32 .* got {number}:"):
        read_vllm({"indexer_topk": text}, "indexer_topk")

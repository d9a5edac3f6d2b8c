"""Whole models: a packed batch trains like batches of its documents, or of its samples."""

import pytest
import torch

from tests.cases.models import VOCABULARY, gpt
from tests.helpers import relative_error
from tests.host import packed as packed_documents
from tests.host import small_config, small_csa_config, start

SWIGLU = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "dsa_indexer_loss_coeff": 0.0,
}
MAKE = {
    "dsa": lambda **changes: small_config(**SWIGLU | changes),
    "v4": lambda **changes: small_csa_config(4, **SWIGLU | {"hc_mult": 4} | changes),
}


def gradients_beside_the_loss(model, batch, params=None):
    """Return the gradients of losses that Megatron adds to the language model's."""
    model.zero_grad()
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params,
    )
    (losses * 0).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def batch_of(rows, masks=None):
    tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
    mask = torch.ones(tokens.shape) if masks is None else masks
    position = torch.arange(tokens.shape[1]).expand_as(tokens).clone()
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": position}
    return {name: value.to(start()) for name, value in batch.items()}


#: Lengths, padded lengths, tokens of the batch, prediction layers. Means over targets of several
#: layers add up only for documents of one length.
DOCUMENTS = {
    "padding behind each": ([5, 9, 12], [8, 12, 16], 36, 1),
    "padding behind the last": ([5, 9, 12], [8, 12, 16], 44, 1),
    "short ones": ([1, 5, 0, 2, 9, 1], [4, 8, 4, 4, 12, 4], 36, 1),
    "no padding": ([5, 1, 9, 2], None, 17, 1),
    "two predictions": ([6, 6, 6], [8, 12, 8], 32, 2),
}


def padded_batch(documents, padded, tokens):
    """Return the documents at padded offsets, with arbitrary tokens between."""
    batch = batch_of(torch.arange(tokens + 1)[None] % VOCABULARY, torch.zeros(1, tokens))
    first = 0
    for document, length in zip(documents, padded, strict=True):
        own = batch_of(document)
        for name, value in own.items():
            batch[name][:, first : first + value.shape[1]] = value
        first += length
    return batch


@pytest.mark.parametrize("case", DOCUMENTS)
@pytest.mark.parametrize("kind", MAKE)
def test_predictions_of_documents(kind, case):
    lengths, padded, tokens, layers = DOCUMENTS[case]
    ratios = {"csa_compress_ratios": [4, 0, 16, 4][: 2 + layers]} if kind == "v4" else {}
    model = gpt(MAKE[kind](mtp_num_layers=layers, **ratios))
    draw = torch.Generator().manual_seed(5)
    documents = [torch.randint(0, VOCABULARY, (1, n + 1), generator=draw) for n in lengths]
    want: dict = {}
    targets = sum(max(length - 1, 0) for length in lengths)
    for document in documents:
        if (own := document.shape[1] - 2) > 0:
            for name, gradient in gradients_beside_the_loss(model, batch_of(document)).items():
                want[name] = want.get(name, 0) + gradient * own / targets
    batch = padded_batch(documents, padded or lengths, tokens)
    params = packed_documents(*lengths, padded_lengths=padded)
    got = gradients_beside_the_loss(model, batch, params)
    assert any("mtp" in name and gradient.abs().max() > 1e-4 for name, gradient in want.items())
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < 1e-5, name


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("kind", MAKE)
def test_experts_are_balanced_by_sample(kind, samples):
    from megatron_dsa.training.data import _pack

    model = gpt(
        MAKE[kind](
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=16,
            moe_layer_freq=1,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=1.0,
            moe_token_dispatcher_type="alltoall",
        )
    )
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(0, VOCABULARY, (samples, 17), generator=draw)
    ends = torch.tensor([[0, 5, 16, 16], [0, 3, 9, 16], [0, 16, 16, 16]]).int().to(start())

    def gradients(chosen):
        batch = batch_of(rows[chosen]) | {
            "cu_seqlens": ends[chosen],
            "max_seqlen": torch.tensor([16] * len(rows[chosen])),
        }
        return gradients_beside_the_loss(model, batch, _pack(batch, 16))

    got, alone = gradients(slice(0, samples)), [gradients(slice(i, i + 1)) for i in range(samples)]
    for name in (name for name in got if "router" in name):
        want = torch.stack([each[name] for each in alone]).mean(0)
        assert want.abs().max() > 1e-4 and relative_error(got[name], want) < 1e-5, name

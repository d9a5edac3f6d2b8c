"""Losses and gradients of a batch with masked tokens do not depend on their division over ranks."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch

from tests import ranks
from tests.helpers import relative_error

LENGTH, VOCABULARY = 96, 61
LENGTHS = [9, 40, 1, 30, 16]  # of packed documents
TOLERANCE = 3e-6  # the cross entropy is in fp32


def masks():
    """Return ten masks ``[96]`` that leave ranks different numbers of tokens."""
    generator = torch.Generator().manual_seed(11)
    found = [torch.ones(LENGTH) for _ in range(3)]
    found[0][:20] = 0
    found[1][1:48] = 0  # all but one of the first half
    found[2][:95] = 0  # all but one of all
    for share in (0.1, 0.3, 0.5, 0.8):
        found.append((torch.rand(LENGTH, generator=generator) < share).float())
    for _ in range(3):
        first, last = torch.randint(LENGTH, (2,), generator=generator).sort().values.tolist()
        found.append(torch.ones(LENGTH))
        found[-1][first:last] = 0
    return found


#: Two microbatches each.
PAIRS = [(first, first + 1) for first in range(0, 10, 2)]


def case(layout="zigzag", packed=False, depths=None, per_token=False, pairs=PAIRS):
    return SimpleNamespace(
        layout=layout, packed=packed, depths=depths, per_token=per_token, pairs=pairs
    )


LAYOUTS = {
    "zigzag": case(),
    "contiguous": case("contiguous"),
    "packed": case("zigzag_rows", packed=True),
    "packed, contiguous": case("contiguous", packed=True),
    "prediction": case(depths=2),
}
CASES = LAYOUTS | {
    f"{name}, per token": SimpleNamespace(**vars(value) | {"per_token": True})
    for name, value in LAYOUTS.items()
}
#: Tensor parallelism adds no layouts.
WITH_TENSORS = {name: CASES[name] for name in ("zigzag", "prediction", "prediction, per token")}


def model_of(case, tp, cp):
    """Return two layers in Megatron's gradient-reducing wrapper, with common weights."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec
    from tests import host

    config = host.small_config(
        num_layers=2,
        mtp_num_layers=case.depths,
        mtp_loss_scaling_factor=0.3,
        options=DSAOptions(cp_layout=case.layout),
        calculate_per_token_loss=case.per_token,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config, dsa_block_spec(config), VOCABULARY + 3, LENGTH, position_embedding_type="rope",
        mtp_block_spec=dsa_mtp_block_spec(config), share_embeddings_and_output_weights=False,
    ).to(host.start()).double()  # fmt: skip
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        cut = getattr(parameter, "tensor_model_parallel", False)
        if cut:
            shape[parameter.partition_dim] *= tp
        generator = torch.Generator().manual_seed(sum(name.encode()))
        full = torch.randn(shape, generator=generator, dtype=torch.float64)
        full = full * 0.3 + 1 if full.dim() == 1 else full * 1.5 * shape[1] ** -0.5
        if cut:
            full = full.chunk(tp, parameter.partition_dim)[rank]
        parameter.data.copy_(full)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model.train())
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, config


def run_case(case, tp, cp):
    """Return logged losses and all gradients of a step, for each pair of masks."""
    from megatron.training import global_vars

    global_vars._GLOBAL_ARGS = SimpleNamespace(calculate_per_token_loss=case.per_token)
    model, config = model_of(case, tp, cp)
    return [step(model, config, case, pair) for pair in case.pairs]


def step(model, config, case, pair):
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_dsa.ops.layout.sharding import Sharding
    from megatron_dsa.training.data import take_tokens
    from megatron_dsa.training.setup import loss_function
    from tests import host

    ranks = config.context_parallel_size
    sharding = Sharding(cp=ranks, cp_rank=mpu.get_context_parallel_rank(), cp_layout=case.layout)
    offsets = packed = None
    if case.packed:
        packed = host.packed(*LENGTHS)
        offsets = packed.cu_seqlens_q

    def forward(numbers, chunk):
        number = next(numbers)
        generator = torch.Generator().manual_seed(number)
        tokens, labels = torch.randint(VOCABULARY, (2, 1, LENGTH), generator=generator)
        batch = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": masks()[number][None],
            "position_ids": torch.arange(LENGTH)[None],
        }
        if ranks > 1:
            take_tokens(batch, sharding, offsets)
        mask = batch["loss_mask"]
        losses = chunk(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask,
            packed_seq_params=packed,
        )  # fmt: skip
        return losses, functools.partial(loss_function, mask)

    MTPLossLoggingHelper.tracker.clear()
    model.zero_grad_buffer()
    logs = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(pair), model=[model], num_microbatches=2,
        seq_length=LENGTH, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    # Sums like Megatron's training.
    loss = torch.stack([log["lm loss"] for log in logs]).sum(0)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(loss, group=group)
    MTPLossLoggingHelper.reduce_metrics_in_tracker()
    predicted = MTPLossLoggingHelper.tracker.get("loss_values", torch.zeros(1)).clone()
    parameters = dict(model.module.named_parameters())
    return {
        "loss": loss,
        "predicted": predicted,
        "gradients": {name: p.main_grad.clone() for name, p in parameters.items()},
        "cut": {
            name: p.partition_dim
            for name, p in parameters.items()
            if getattr(p, "tensor_model_parallel", False)
        },
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return ranks.spawn(run_case, CASES, 1, tmp_path_factory.mktemp("single"))[0]


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2)])
def test_ranks_equal_one(single, tp, cp, tmp_path):
    cases = CASES if tp == 1 else WITH_TENSORS
    got = ranks.spawn(run_case, cases, tp, tmp_path, cp)
    for name, number in itertools.product(cases, range(len(PAIRS))):
        want, place = single[name][number], (name, PAIRS[number])
        for rank, results in enumerate(got):
            result = results[name][number]
            for figure in ("loss", "predicted"):
                close = torch.allclose(result[figure], want[figure], rtol=TOLERANCE)
                assert close, (*place, figure, result[figure], want[figure])
            assert set(result["gradients"]) == set(want["gradients"])
            for parameter, gradient in result["gradients"].items():
                full = want["gradients"][parameter]
                if parameter in result["cut"]:
                    full = full.chunk(tp, result["cut"][parameter])[rank % tp]
                assert full.norm() > 0, parameter
                error = relative_error(gradient, full)
                assert error < TOLERANCE, (*place, parameter, error)

"""One checkpoint, three readers: ``dsa_fused``, megatron-core's DSA, and ``dsa_unfused``."""

import pytest

from tests.functional.checkpoint_reader import read
from tests.functional.launch import train

BUNDLED = "tests.functional.bundled_pretrain"
#: Changes to our command line for megatron-core's DSA.
WITHOUT_US = {
    "--attention-backend": None,
    "--dsa-indexer-loss-queries": None,
    "--experimental-attention-variant": "dsa",
    "--dsa-kernel-backend": "none",
}
MODEL = {
    # megatron-core rotates in bf16 only, with a package; it changes no score.
    "--no-dsa-indexer-rotate-activation": True,
    # With it many scores are 0, and ties are broken differently.
    "--no-dsa-indexer-scoring-relu": True,
}
#: Like GLM-5.2: experts, and every other layer reuses the previous selection.
EXPERTS = {
    "--num-layers": 4,
    "--dsa-indexer-topk-freq": 2,
    "--dsa-indexer-skip-topk-offset": 1,
    "--num-experts": 4,
    "--moe-layer-freq": "[0,1,1,1]",
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
}
#: Tolerances of printed figures.
TOLERANCES = {"lm loss": 1e-5, "indexer loss": 1e-3, "grad norm": 2e-3}


def check_same(steps, expected, share=1.0):
    """Compare two logged steps after a start.

    ``share``: layers with an indexer; megatron-core divides their loss by all layers.
    """
    for name, tolerance in TOLERANCES.items():
        first, second = (step[name] for step in expected)
        if name == "indexer loss":
            first, second = share * first, share * second
        assert [step[name] for step in steps] == pytest.approx([first, second], tolerance), name


@pytest.mark.parametrize(
    "model, share", [({}, 1), (EXPERTS, 0.5)], ids=["dense layers", "experts, shared indices"]
)
def test_three_readers_of_one_checkpoint(model, share, data, tmp_path):
    """Each resumes, with the optimizer, from the previous one; steps and saved state must equal an
    uninterrupted run's.
    """
    flags = MODEL | model | {"--data-path": data, "--train-iters": 6, "--save-interval": 2}
    whole, theirs, back = (tmp_path / name for name in ("whole", "theirs", "back"))
    expected = train(flags | {"--save": whole}).steps
    load = {"--load": whole, "--ckpt-step": 2, "--exit-interval": 4}
    bundled = train(flags | WITHOUT_US | load | {"--save": theirs}, module=BUNDLED)
    assert "megatron_dsa ran" not in bundled.log
    mean = dict(expected[3])  # Megatron's second line is the mean of both steps
    for name in ("lm loss", "indexer loss"):
        mean[name] = (expected[2][name] + expected[3][name]) / 2
    check_same(bundled.steps, [expected[2], mean], share)
    unfused = {"--attention-backend": "dsa_unfused", "--load": theirs, "--save": back}
    check_same(train(flags | unfused).steps, expected[4:6])

    names, theirs_names = set(read(whole)), set(read(theirs))
    assert names == theirs_names and any(".indexer." in name for name in names)
    end = read(back)
    assert set(end) == names
    for name, tensor in read(whole).items():
        if not name.startswith(("optimizer", "rng")):
            error = (end[name] - tensor).norm() / tensor.norm()
            # Its gradient is little more than rounding, which Adam scales up.
            limit = 5e-2 if name.endswith("indexer.k_norm.bias") else 1e-2
            assert error < limit, (name, error)

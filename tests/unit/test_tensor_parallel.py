"""Two tensor-parallel ranks in one process each: same selection, same gradients as one rank."""

from tests.ranks import Case, compare, run

CASE = Case(
    config="small_config",
    selector="dsa",
    by_rows=("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    by_columns=("linear_proj",),
)


def test_two_ranks_equal_one(tmp_path, monkeypatch):
    # On the CPU also where there is a GPU: NCCL wants one GPU per rank (see tests/functional).
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (one,) = run({"dsa": CASE}, 1, tmp_path)
    two = run({"dsa": CASE}, 2, tmp_path)
    assert len(one["dsa"]["indices"]) == 1
    compare(CASE, one["dsa"], [rank["dsa"] for rank in two])

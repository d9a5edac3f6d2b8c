"""Tables of hash routing, with experts per token id."""

import torch

from megatron_dsa.errors import ConfigError, require


def balanced_table(vocabulary: int, topk: int, experts: int, seed: int) -> torch.Tensor:
    """Return a random table ``[vocabulary, topk]`` with equally frequent experts, int32 on the CPU.

    Concatenated random orders of the experts give each token the next ``topk``; swaps within an
    order remove repetitions.
    """
    require(
        experts >= topk,
        f"experts must be at least topk = {topk}, got {experts}: the experts of a token differ",
    )
    rounds = -(-vocabulary * topk // experts)
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = rounds, experts
    draws = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    orders = draws.argsort(dim=1, stable=True).tolist()
    for number in range(1, rounds):
        begun = number * experts % topk  # number of experts from the previous order
        if begun:
            _keep_apart(orders[number], set(orders[number - 1][-begun:]), topk - begun)
    table = torch.tensor(orders, dtype=torch.int32, device="cpu").flatten()
    return table[: vocabulary * topk].view(vocabulary, topk)


def _keep_apart(order: list[int], taken: set[int], first: int) -> None:
    """Swap ``taken`` experts in ``order[:first]`` with later experts, in place."""
    later = first
    for index in range(first):
        if order[index] in taken:
            while order[later] in taken:
                later += 1
            order[index], order[later] = order[later], order[index]
            later += 1


def check_table(table: torch.Tensor, topk: int, experts: int, name: str) -> None:
    """Check a hash-routing table ``[vocabulary, topk]`` on the host."""
    require(
        table.dim() == 2 and table.shape[1] == topk and not table.is_floating_point(),
        f"{name} must hold integers [vocabulary, --moe-router-topk = {topk}], got {table.dtype} "
        f"{list(table.shape)}: give the table of this model",
    )
    outside = ((table < 0) | (table >= experts)).any(1)
    ordered = table.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    for wrong, rule, fix in (
        (
            outside, f"hold experts from 0 to --num-experts - 1 = {experts - 1}",
            ", or give the --num-experts that it was made for",
        ),
        (repeated & ~outside, "not name an expert twice for a token", ""),
    ):  # fmt: skip
        tokens = wrong.nonzero().flatten().tolist()
        if tokens:
            raise ConfigError(
                f"{name} must {rule}, got {table[tokens[0]].tolist()} for token {tokens[0]} "
                f"({len(tokens)} such rows): load a checkpoint that has the table{fix}"
            )

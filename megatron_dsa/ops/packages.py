"""Why an optional kernel package cannot be used: missing, too old, or made for another GPU."""

from __future__ import annotations

import importlib.util

from megatron_dsa.dispatch import Problem
from megatron_dsa.versions import installed_version, parse_version


def package_problem(
    problem: Problem,
    *,
    module: str,
    install: str,
    capabilities: tuple[tuple[int, int], ...],
    distribution: str | None = None,
    minimum: str | None = None,
) -> str | None:
    """Return the reason in words, with the fix, or ``None``.

    Args:
        problem: says on which device it would run.
        module: what is imported.
        install: how to get it.
        capabilities: compute capabilities of the GPUs that it has kernels for.
        distribution, minimum: name and lowest usable version, if there is one.
    """
    if problem.capability not in capabilities:
        wanted = ", ".join("{}.{}".format(*c) for c in capabilities)
        return (
            f"wrong GPU: {module} has kernels for compute capability {wanted}, "
            f"this is {problem.on()}"
        )
    if importlib.util.find_spec(module) is None:
        return f"missing: {module} is not installed; {install}"
    if distribution is not None and minimum is not None:
        found = installed_version(distribution)
        if found is None or parse_version(found) < parse_version(minimum):
            return f"too old: {distribution} {found} found, >= {minimum} needed; {install}"
    return None

"""Compile TileLang programs, once per arguments and for any target, without a GPU.

Files with programs postpone no annotations: TileLang reads the shapes of tensors from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tilelang

_PASSES = tilelang.PassConfigKey
#: Passes for programs that hand over all that is shared at barriers of their own. TileLang's
#: barriers between accesses to shared memory are left out: it sees one warpgroup at a time.
OWN_BARRIERS = {_PASSES.TL_ENABLE_FAST_MATH: True, _PASSES.TL_DISABLE_THREAD_STORAGE_SYNC: True}
#: Passes for programs that keep TileLang's barriers.
FAST_MATH = {_PASSES.TL_ENABLE_FAST_MATH: True}
#: Passes for programs that also run where there is no wgmma.
PORTABLE = {_PASSES.TL_ENABLE_FAST_MATH: True, _PASSES.TL_DISABLE_WGMMA: True}


def compiler(build: Callable, passes: dict | None = None) -> Callable:
    """Return a function that compiles ``build(*arguments, **options)`` when it is first called.

    It takes the arguments of ``build`` and a ``target`` (``"sm_90a"`` by default), and returns what
    the docstring of ``build`` describes, callable.
    """

    @functools.cache
    def compiled(*arguments, target: str = "sm_90a", **options):
        cuda = {"kind": "cuda", "arch": target}
        return tilelang.compile(build(*arguments, **options), target=cuda, pass_configs=passes)

    return compiled

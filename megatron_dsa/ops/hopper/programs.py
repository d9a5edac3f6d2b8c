"""Compilation of TileLang programs, cached, for any target and without a GPU."""

import functools
from collections.abc import Callable

import tilelang

_PASSES = tilelang.PassConfigKey
#: For explicit barriers only: TileLang's see one warpgroup at a time.
OWN_BARRIERS = {_PASSES.TL_ENABLE_FAST_MATH: True, _PASSES.TL_DISABLE_THREAD_STORAGE_SYNC: True}
FAST_MATH = {_PASSES.TL_ENABLE_FAST_MATH: True}
#: For GPUs without wgmma.
PORTABLE = {_PASSES.TL_ENABLE_FAST_MATH: True, _PASSES.TL_DISABLE_WGMMA: True}


def compiler(build: Callable, passes: dict | None = None) -> Callable:
    @functools.cache
    def compiled(*arguments, target: str = "sm_90a", **options):
        cuda = {"kind": "cuda", "arch": target}
        return tilelang.compile(build(*arguments, **options), target=cuda, pass_configs=passes)

    return compiled

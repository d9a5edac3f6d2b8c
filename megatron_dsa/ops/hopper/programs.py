"""Cached compilation of TileLang programs for any target; no GPU is needed."""

import functools
from collections.abc import Callable

import tilelang

_PASSES = tilelang.PassConfigKey
#: Compile options without automatic barriers, which cover only one warpgroup.
MANUAL_BARRIERS = {_PASSES.TL_ENABLE_FAST_MATH: True, _PASSES.TL_DISABLE_THREAD_STORAGE_SYNC: True}
FAST_MATH = {_PASSES.TL_ENABLE_FAST_MATH: True}
#: Compile options for GPUs without wgmma.
PORTABLE = {_PASSES.TL_ENABLE_FAST_MATH: True, _PASSES.TL_DISABLE_WGMMA: True}


def compiler(build: Callable, passes: dict | None = None) -> Callable:
    @functools.cache
    def compiled(*arguments, target: str = "sm_90a", **options):
        cuda = {"kind": "cuda", "arch": target}
        return tilelang.compile(build(*arguments, **options), target=cuda, pass_configs=passes)

    return compiled

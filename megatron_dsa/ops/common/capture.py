"""Caches of tensors that work with CUDA graphs.

A graph reads tensors at fixed addresses, so tensors looked up during capture are never evicted.
Tensors computed during capture have no content before a replay, so they are not cached.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch


def capturing() -> bool:
    # is_current_stream_capturing fails without a driver.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class TensorCache:
    def __init__(self, size: int):
        self._size = size
        self._made: OrderedDict[Hashable, Any] = OrderedDict()
        self._captured: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        in_graph = capturing()
        if key in self._made:
            self._made.move_to_end(key)
            if in_graph:
                self._captured[key] = self._made[key]
            return self._made[key]
        if key in self._captured:
            return self._captured[key]
        made = make()
        if not in_graph:
            self._made[key] = made
            if len(self._made) > self._size:
                self._made.popitem(last=False)
        return made

    def clear(self) -> None:
        self._made.clear()


class CachedFunction[**Arguments, Result]:
    def __init__(self, function: Callable[Arguments, Result], size: int):
        self._function, self._cache = function, TensorCache(size)
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        def make() -> Result:
            with torch.inference_mode(False):  # training reuses tensors cached in evaluation
                return self._function(*arguments, **named)

        key = (*arguments, *sorted(named.items())) if named else arguments
        return self._cache.get(key, make)

    def cache_clear(self) -> None:
        self._cache.clear()


def tensor_cache[**Arguments, Result](
    size: int,
) -> Callable[[Callable[Arguments, Result]], CachedFunction[Arguments, Result]]:
    return lambda function: CachedFunction(function, size)

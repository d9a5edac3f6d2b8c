"""Tracking of a computation's memory and communication."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

c10d = torch.ops.c10d

#: Collective -> argument indices of group and undivided tensors, and a multiplier of bytes.
_COLLECTIVES = {
    c10d.allreduce_.default: (1, 0, 2),
    c10d._allgather_base_.default: (2, 0, 1),
    c10d._reduce_scatter_base_.default: (2, 1, 1),
    c10d.alltoall_base_.default: (2, 0, 1),
    c10d.broadcast_.default: (1, 0, 1),
    c10d.allgather_.default: (2, 0, 1),
}
#: Operations that receive whole tensors from one rank.
_RECEIVES = (c10d.recv_.default,)


class MemoryTracker(TorchDispatchMode):
    """Tracker of new storages on any device.

    Autograd sums gradients in place, but not under a dispatch mode: the output of a sum counts only
    if all terms stay alive.
    """

    def __init__(self, name_of: Callable[[ProcessGroup], str] = lambda group: "ranks"):
        super().__init__()
        self.live = self._peak = 0
        self.received: Counter[str] = Counter()
        self._bytes: dict[int, int] = {}
        #: Storage -> backward node that created it.
        self._makers: dict[int, int] = {}
        #: Live bytes with the last gradient sum, and terms that may hold the sum in place.
        self._sum: tuple[int, list[int]] | None = None
        self._name_of = name_of

    @property
    def peak(self) -> int:
        self._count_last_sum()
        return self._peak

    def restart(self) -> int:
        """Reset the peak; return live bytes."""
        self._count_last_sum()
        self._peak = self.live
        return self.live

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Exclude parameters and buffers, since operations may return views of them."""
        for tensor in tensors:
            self._bytes.setdefault(tensor.untyped_storage()._cdata, 0)

    def __enter__(self):
        # Megatron frees recomputed tensors by resizing their storage.
        resize = torch.UntypedStorage.resize_
        tracker = self

        def resized(storage, size):
            result = resize(storage, size)
            if (key := storage._cdata) in tracker._bytes:
                tracker._count(storage.nbytes() - tracker._bytes[key])
                tracker._bytes[key] = storage.nbytes()
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._exchange(func, args)
        result = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        terms = []
        if func is torch.ops.aten.add.Tensor and number is not None and _autograd_calls():
            terms = self._terms(args, number)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor, number, terms)
        return result

    def _follow(self, tensor: torch.Tensor, node: int | None, terms: list[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._bytes:
            return
        self._count_last_sum()
        self._bytes[key] = storage.nbytes()
        if node is not None:
            self._makers[key] = node
        self._count(storage.nbytes(), terms)
        # Autograd also keeps a storage's Python object.
        weakref.finalize(storage, self._forget, key)

    def _count(self, more: int, terms: Sequence[int] = ()) -> None:
        self._count_last_sum()
        self.live += more
        if terms:
            self._sum = self.live, list(terms)
        else:
            self._peak = max(self._peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._bytes.pop(key)
        self._makers.pop(key, None)

    def _terms(self, args, node: int) -> list[int]:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        keys = [x.untyped_storage()._cdata for x in tensors]
        # Sums inside one backward node are no gradient sums.
        if all(self._makers.get(key) == node for key in keys):
            return []
        return [key for key, x in zip(keys, tensors, strict=True) if self._may_be_written(key, x)]

    def _may_be_written(self, key: int, x: torch.Tensor) -> bool:
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return self._bytes.get(key, 0) > 0 and span == x.numel()

    def _count_last_sum(self) -> None:
        if self._sum is not None:
            (live, terms), self._sum = self._sum, None
            if all(key in self._bytes for key in terms):
                self._peak = max(self._peak, live)
            self._peak = max(self._peak, self.live)

    def _exchange(self, func, args) -> None:
        if func in _RECEIVES:
            self.received[self._name_of(ProcessGroup.unbox(args[1]))] += _size(args[0])
        elif func in _COLLECTIVES:
            group_index, tensors, times = _COLLECTIVES[func]
            group = ProcessGroup.unbox(args[group_index])
            share = (group.size() - 1) / group.size()
            size = round(times * share * _size(args[tensors]))
            if size:
                self.received[self._name_of(group)] += size


def _autograd_calls() -> bool:
    """Return whether autograd itself called this operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("inner", "_fn"):
        frame = frame.f_back
    return "run_backward" in frame.f_code.co_names


def _size(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tensors))

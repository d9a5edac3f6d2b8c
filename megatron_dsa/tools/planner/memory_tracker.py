"""Counts the memory that a computation holds, and the bytes that it exchanges, by watching it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

c10d = torch.ops.c10d

#: Collective -> place of its process group among the arguments, and of the tensors (those that are
#: not divided over ranks) whose bytes count, how often.
_COLLECTIVES = {
    c10d.allreduce_.default: (1, 0, 2),
    c10d._allgather_base_.default: (2, 0, 1),
    c10d._reduce_scatter_base_.default: (2, 1, 1),
    c10d.alltoall_base_.default: (2, 0, 1),
    c10d.broadcast_.default: (1, 0, 1),
    c10d.allgather_.default: (2, 0, 1),
}
#: Received from one other rank, whole.
_RECEIVES = (c10d.recv_.default,)


class MemoryTracker(TorchDispatchMode):
    """Follows the storages that are made under it, of any device.

    Attributes:
        live: bytes of storages that were made and are still alive.
        peak: the most that were alive at once since :meth:`restart`.
        received: bytes that this rank receives, per name of a group.

    Args:
        name_of: names a process group.
    """

    def __init__(self, name_of: Callable[[ProcessGroup], str] = lambda group: "ranks"):
        super().__init__()
        self.live = self.peak = 0
        self.received: Counter[str] = Counter()
        self._bytes: dict[int, int] = {}
        self._name_of = name_of

    def restart(self) -> int:
        """Begin a new phase: forget the peak; return what is alive."""
        self.peak = self.live
        return self.live

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Do not count tensors from before (parameters) when an operation returns a view of one."""
        for tensor in tensors:
            self._bytes.setdefault(tensor.untyped_storage()._cdata, 0)

    def __enter__(self):
        # No operation: Megatron empties the storage of what it will compute again.
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
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self._count(storage.nbytes())
        # A storage keeps its Python object while anything refers to it, autograd included.
        weakref.finalize(storage, self._forget, key)

    def _count(self, more: int) -> None:
        self.live += more
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._bytes.pop(key)

    def _exchange(self, func, args) -> None:
        if func in _RECEIVES:
            self.received[self._name_of(ProcessGroup.unbox(args[1]))] += _size(args[0])
        elif func in _COLLECTIVES:
            place, tensors, times = _COLLECTIVES[func]
            group = ProcessGroup.unbox(args[place])
            share = (group.size() - 1) / group.size()
            size = round(times * share * _size(args[tensors]))
            if size:
                self.received[self._name_of(group)] += size


def _size(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tensors))

"""Import of Megatron-Bridge without the packages that need a GPU."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

from megatron_dsa.patches import cpu_host

#: Imported by Bridge.
STAND_INS = (
    *("transformer_engine", "transformer_engine_torch", "megatron.energon"),
    *("nvidia_resiliency_ext", "modelopt"),
)


class _Nothing(type):
    """Class whose attributes are such classes, and whose calls return ``None``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __call__(cls, *args, **kwargs) -> Any:
        return None if cls.__bases__ == (object,) else super().__call__(*args, **kwargs)


def _nothing(name: str) -> type:
    return _Nothing(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if _stands_in(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        """Leave the module empty."""


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace :data:`STAND_INS` by inert modules in the body, without a GPU.

    Modules imported later do not find them.
    """
    if not cpu_host.needed():
        yield
        return
    cpu_host.activate()
    import megatron_dsa.specs  # noqa: F401  # megatron-core itself goes without

    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _stands_in(name)}
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in filter(_stands_in, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(hidden)


def _stands_in(name: str) -> bool:
    return any(f"{name}.".startswith(f"{each}.") for each in STAND_INS)

"""Records of what modules call: operations, and delayed weight gradients of linears."""

import contextlib
import dataclasses
from unittest import mock

from megatron_dsa.ops.dispatch import Operation


@contextlib.contextmanager
def recorded_calls(prefix=""):
    """Return a list that gets ``(operation, call)`` of every call, packed or not left out.

    Args:
        prefix: of the names of operations.
    """
    calls, original = [], Operation.run

    def record(operation, call, *arguments, **settings):
        if operation.name.startswith(prefix):
            calls.append((operation.name, dataclasses.replace(call, packed=False)))
        return original(operation, call, *arguments, **settings)

    with mock.patch.object(Operation, "run", record):
        yield calls


def of_any_batch(calls):
    """Return calls without what depends on the batch."""
    return {(name, dataclasses.replace(call, packed=False, topk=None)) for name, call in calls}


def delayed_linears(module):
    """Return the names of the linears whose ``backward_dw`` the module's reaches, in order."""
    called = []
    for name, child in module.named_modules():
        if name.rpartition(".")[2].startswith("linear"):
            child.backward_dw = lambda name=name: called.append(name)
    module.backward_dw()
    return called

"""Records of operation calls and of delayed weight gradients."""

import contextlib
import dataclasses
from unittest import mock

from megatron_dsa.ops.dispatch import Operation


@contextlib.contextmanager
def recorded_calls(prefix=""):
    """Return a list that collects ``(operation, call)`` of every call; ``prefix`` filters
    by name.
    """
    calls, original = [], Operation.run

    def record(operation, call, *arguments, **settings):
        if operation.name.startswith(prefix):
            calls.append((operation.name, dataclasses.replace(call, packed=False)))
        return original(operation, call, *arguments, **settings)

    with mock.patch.object(Operation, "run", record):
        yield calls


def of_any_batch(calls):
    """Return calls without batch-dependent fields."""
    return {(name, dataclasses.replace(call, packed=False, topk=None)) for name, call in calls}


def delayed_linears(module):
    """Return the linears reached by the module's ``backward_dw``, in order."""
    called = []
    for name, child in module.named_modules():
        if name.rpartition(".")[2].startswith("linear"):
            child.backward_dw = lambda name=name: called.append(name)
    module.backward_dw()
    return called

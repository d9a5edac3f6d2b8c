"""Megatron for the forked processes, with cached help texts of its flags, which it parses twice."""

from argparse import ArgumentParser

from megatron.training import arguments, training  # noqa: F401
from megatron.training.argument_utils import ArgumentGroupFactory

_read = ArgumentGroupFactory._get_field_docstrings
_texts: dict[type, dict[str, str]] = {}


def _read_once(factory: ArgumentGroupFactory, config: type) -> dict[str, str]:
    if config not in _texts:
        _texts[config] = _read(factory, config)
    return dict(_texts[config])


ArgumentGroupFactory._get_field_docstrings = _read_once
arguments.add_megatron_arguments(ArgumentParser())

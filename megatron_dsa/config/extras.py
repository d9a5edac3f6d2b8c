"""Extras, loaded by name when a flag needs one: the core imports none of them."""

import importlib
from types import ModuleType

from megatron_dsa.errors import ConfigError


def load_extra(module: str, flag: str) -> ModuleType:
    """Import ``megatron_dsa.extras.<module>`` for a flag.

    Raises:
        ConfigError: this installation lacks the extra.
    """
    found = optional_extra(module)
    if found is None:
        folder = module.partition(".")[0]
        raise ConfigError(
            f"{flag} needs megatron_dsa/extras/{folder}, which this installation lacks: install "
            "megatron_dsa whole, or do without"
        )
    return found


def optional_extra(module: str) -> ModuleType | None:
    """Import ``megatron_dsa.extras.<module>``; return ``None`` if this installation lacks it."""
    name = f"megatron_dsa.extras.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Anything else that is missing is the error of that module.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None

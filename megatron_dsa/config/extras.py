"""Import of optional extras by name."""

import importlib
from types import ModuleType

from megatron_dsa.errors import ConfigError


def load_extra(module: str, flag: str) -> ModuleType:
    """Import ``megatron_dsa.extras.<module>`` for a flag, or raise :class:`ConfigError`."""
    found = optional_extra(module)
    if found is None:
        folder = module.partition(".")[0]
        raise ConfigError(
            f"{flag} needs megatron_dsa/extras/{folder}, which this installation lacks: install "
            "megatron_dsa whole, or do without"
        )
    return found


def optional_extra(module: str) -> ModuleType | None:
    name = f"megatron_dsa.extras.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Raise if a dependency of the extra is missing.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None

"""Rows of rules: a field, the values that it must have, and why; the message is made of them."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megatron_dsa.config.fields import flag_of


class Not(tuple):
    """Values that a field must not have."""


class Must(NamedTuple):
    """A rule for one field.

    Attributes:
        name: field of the transformer configuration, or else of the options.
        values: the value that it must have; a tuple: one of them; :class:`Not`: none of them.
        why: reason, and the fix where it is not to drop the flag.
        flag: the flag, where its name is not made of the field's.
    """

    name: str
    values: Any
    why: str
    flag: str = ""

    def check(self, config: Any, options: Any = None, case: str = "") -> tuple[bool, str]:
        """Return whether the rule holds, and the message; ``case`` is when it applies."""
        holder = config if hasattr(config, self.name) else options
        if not hasattr(holder, self.name):
            return True, ""  # of another class of configurations
        given = getattr(holder, self.name)
        flag, values = self.flag or flag_of(self.name), self.values
        case, drop = case and f" {case}", "" if ";" in self.why else "; drop it"
        if values is True:
            return bool(given), f"{flag} is required{case}: {self.why}"
        if values is False:
            return not given, f"{flag} is not supported{case}: {self.why}{drop}"
        if values is None:
            unset = given is None or given is False
            return unset, f"{flag} must be unset{case}, got {given!r}: {self.why}{drop}"
        if isinstance(values, Not):
            return given not in values, f"{flag} must not be {given}{case}: {self.why}"
        allowed = values if isinstance(values, tuple) else (values,)
        wanted = " or ".join("unset" if value is None else str(value) for value in allowed)
        return given in allowed, f"{flag} must be {wanted}{case}, got {given}: {self.why}"


def uses_csa(config: Any) -> bool:
    """Return whether the layers are V4's attention."""
    return getattr(config, "csa_compress_ratios", None) is not None


def check_rows(
    rows: Iterable[Must], config: Any, options: Any = None, case: str = ""
) -> Iterator[tuple[bool, str]]:
    """Yield ``(ok, message)`` for rows of a table, see :meth:`Must.check`."""
    for row in rows:
        yield row.check(config, options, case)

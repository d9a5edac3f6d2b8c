"""Tables of rules: field, required values, reason."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megatron_dsa.config.fields import flag_of


class Not(tuple):
    """Values that a configuration field must not have."""


class Must(NamedTuple):
    """Rule for the values of one configuration field.

    Attributes:
        name: field of the configuration, else of the options.
        values: required value, tuple of allowed values, or :class:`Not` of forbidden values.
        why: reason, then the fix unless it is to drop the flag.
        flag: flag that cannot be derived from ``name``.
    """

    name: str
    values: Any
    why: str
    flag: str = ""

    def check(self, config: Any, options: Any = None, case: str = "") -> tuple[bool, str]:
        """Check a configuration against this rule and return ``(ok, message)``."""
        holder = config if hasattr(config, self.name) else options
        if not hasattr(holder, self.name):
            return True, ""  # other configuration classes lack the field
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
    return getattr(config, "csa_compress_ratios", None) is not None


def check_rows(
    rows: Iterable[Must], config: Any, options: Any = None, case: str = ""
) -> Iterator[tuple[bool, str]]:
    for row in rows:
        yield row.check(config, options, case)

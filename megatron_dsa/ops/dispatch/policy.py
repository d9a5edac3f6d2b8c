"""User's policy on implementations: fused, strict, or by name."""

import difflib
import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.dispatch.hashing import HashedOnce

#: Environment variable with pairs ``OPERATION=NAME``, separated by commas.
VARIABLE = "MEGATRON_DSA_IMPL"
FLAG = "--dsa-impl"

#: Values of ``--dsa-indexer-numerics``: exact index scores or DeepGEMM's arithmetic.
EXACT, DEEPGEMM_FP8 = "exact", "deepgemm-fp8"

DEFAULT_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Policy(HashedOnce):
    """User's choices of implementations; invalid values raise :class:`ConfigError`.

    Attributes:
        fused: prefer fused implementations (``--attention-backend dsa_fused``).
        strict: raise :class:`FallbackError` instead of falling back (``--dsa-strict``).
        workspace_bytes: budget for temporary memory.
        named: pairs ``(operation, implementation)`` that run or raise, regardless of ``fused``
            (``--dsa-impl sparse_attention_forward=flashmla``).
        indexer_numerics: ``exact`` or ``deepgemm-fp8``.
    """

    fused: bool = True
    strict: bool = False
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    named: tuple[tuple[str, str], ...] = ()
    indexer_numerics: str = "exact"

    def __post_init__(self) -> None:
        require(
            self.workspace_bytes >= 1,
            f"Policy: workspace_bytes must be positive, got {self.workspace_bytes}: give a number "
            "of bytes",
        )
        require(
            self.indexer_numerics in (EXACT, DEEPGEMM_FP8),
            f"Policy: indexer_numerics must be {EXACT} or {DEEPGEMM_FP8}, got "
            f"{self.indexer_numerics!r}",
        )

    __hash__ = HashedOnce.__hash__

    def named_for(self, operation: str) -> str | None:
        named = dict(_pairs(os.environ.get(VARIABLE, ""))) | dict(self.named)
        value = named.get(operation)
        return None if value == "auto" else value


@lru_cache(maxsize=8)
def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return parse_named(text.split(","), VARIABLE)


def parse_named(words: Collection[str], source: str) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for word in filter(None, map(str.strip, words)):
        operation, equals, name = (part.strip() for part in word.partition("="))
        require(
            bool(operation and equals and name),
            f"{source} must hold OPERATION=IMPLEMENTATION, got {word!r}: for example "
            "sparse_attention_forward=flashmla",
        )
        require(
            pairs.setdefault(operation, name) == name,
            f"{source} names two implementations of {operation}, {pairs[operation]} and {name}: "
            "drop one",
        )
    return tuple(pairs.items())


def check_operations(names: Collection[str], known: Collection[str], source: str) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
            raise ConfigError(
                f"{source} names the operation {name!r}, which does not exist; the closest: "
                f"{', '.join(close)}"
            )


def check_environment(known: Collection[str]) -> list[str]:
    """Return a warning for each unused environment variable with the package's prefix.

    Raises:
        ConfigError: ``VARIABLE`` names an unknown operation, or a variable resembles ``VARIABLE``.
    """
    check_operations(dict(_pairs(os.environ.get(VARIABLE, ""))), known, VARIABLE)
    warnings = []
    for name in sorted(os.environ):
        if not name.upper().startswith("MEGATRON_DSA_") or name == VARIABLE:
            continue
        line = f"environment variable {name}: megatron_dsa does not read it"
        if name.upper().endswith("IMPL"):
            raise ConfigError(f"{line}; unset it and set {VARIABLE}=OPERATION=IMPLEMENTATION")
        warnings.append(f"{line}; it reads {VARIABLE}")
    return warnings

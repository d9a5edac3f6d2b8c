"""Base class that caches the hash of frozen dataclasses."""

import dataclasses
from typing import Any


class HashedOnce:
    """Base of frozen dataclasses that serve as cache keys in every call of an operation.

    Subclasses set ``__hash__ = HashedOnce.__hash__``; otherwise ``dataclass`` replaces it.
    """

    def __hash__(self) -> int:
        kept = self.__dict__
        if "_hash" not in kept:
            fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
            kept["_hash"] = hash(tuple(kept[field.name] for field in fields))
        return kept["_hash"]

    def __getstate__(self) -> dict[str, Any]:
        # Do not pickle the hash: hashes of strings differ between processes.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

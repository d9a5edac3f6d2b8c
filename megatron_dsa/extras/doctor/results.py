"""What a check says: figures, complaints, verdicts, and the exit code that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_dsa.testing.cases import Shape
from megatron_dsa.testing.comparison import Comparison

OK, WRONG, NOT_PROVEN = 0, 1, 2


@dataclass(kw_only=True)
class Part(Comparison):
    """What was found out about one implementation, or about several that only run together.

    Attributes:
        implementations: pairs (operation, name).
        fused: whether one of them is fused.
        deterministic: whether all of them are declared deterministic.
        crashed: the exception, in words.
        skipped: why it was not run at all.
        same_bits: whether repeats agreed bit for bit; ``None`` if it was not repeated.
        ms: median time by figure.
        warmup_s: seconds of first calls: imports, compilation, loading.
        remarks: what else is worth saying; no complaint.
    """

    implementations: tuple[tuple[str, str], ...]
    fused: bool
    deterministic: bool
    crashed: str | None = None
    skipped: str | None = None
    same_bits: bool | None = None
    ms: dict[str, float] = field(default_factory=dict)
    warmup_s: float = 0.0
    remarks: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " + ".join(name for _, name in self.implementations)

    def add(self, other: Part) -> None:
        """Take over what was found out about the same implementations elsewhere."""
        for figure, error in other.errors.items():
            self.keep_worst(figure, error)
        for complaint in other.complaints:
            self.require(False, complaint)
        self.crashed = self.crashed or other.crashed
        self.ms |= other.ms
        self.warmup_s += other.warmup_s
        self.remarks += other.remarks

    def wrong(self) -> list[str]:
        """Return everything that is not as it must be, in words; empty if all is well."""
        said = super().wrong()
        if self.deterministic and self.same_bits is False:
            said.append("repeats differ, though declared deterministic")
        return said


@dataclass
class Result:
    """The verdict on one combination of implementations at one shape.

    Attributes:
        check: ``"sparse attention"``, ``"teacher"``, ``"index selection"``, ``"engine scores"`` or
            ``"indexer loss"``.
        label: the shape in words.
        shape: the shape that was run.
        parts: what was found; in "sparse attention" the forward and the backward.
        chosen: whether dispatch picks exactly these implementations.
    """

    check: str
    label: str
    shape: Shape
    parts: tuple[Part, ...]
    chosen: bool

    @property
    def ok(self) -> bool:
        return not any(part.crashed or part.wrong() for part in self.parts)

    @property
    def fused(self) -> bool:
        return any(part.fused for part in self.parts)

    @property
    def verdict(self) -> str:
        said = []
        for part in self.parts:
            role = part.implementations[0][0].rsplit("_", 1)[-1]  # forward or backward
            prefix = f"{role} {part.name}: " if len(self.parts) > 1 else ""
            if part.crashed:
                said.append(f"crashed {prefix}{part.crashed}")
            if part.wrong():
                said.append(f"WRONG {prefix}{', '.join(part.wrong())}")
        return "; ".join(said) or "ok"


@dataclass(frozen=True)
class NotChecked:
    """An implementation that was not run, and why."""

    operation: str
    name: str
    label: str
    reason: str


@dataclass
class Report:
    """Everything that one run of the doctor found.

    Attributes:
        environment: versions and GPU.
        asked, shapes: the shapes the user asked for, and those that were run.
        chosen: by shape and operation, what dispatch picks and why nothing else.
        results, not_checked: what was run and what was not.
        remarks: limits of this run that the reader must know.
        incomplete: checks that could not be made for want of memory.
    """

    environment: dict
    asked: list[Shape]
    shapes: list[Shape]
    chosen: dict[str, dict[str, dict]] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    def wrong(self) -> list[Result]:
        return [result for result in self.results if not result.ok]

    def exit_code(self, allow_unfused: bool) -> int:
        """See the help text of ``python -m megatron_dsa doctor``."""
        if self.wrong():
            return WRONG
        if self.incomplete or not self.results:
            return NOT_PROVEN
        fused = any(result.fused for result in self.results)
        return OK if fused or allow_unfused else NOT_PROVEN

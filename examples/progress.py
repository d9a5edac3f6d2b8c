"""A training's output as one line of progress, with validations and warnings above it.

    training | python examples/progress.py "stage 2/3"

On a terminal the line is rewritten in place, in colour; elsewhere it is printed now and then.
"""

import contextlib
import os
import re
import shutil
import sys
import time

#: Seconds between lines of progress outside a terminal.
EVERY = 10
ITERATION = re.compile(r" *\[[^]]*\] *iteration +(\d+)/ *(\d+) \|(.*)")
LOSSES = {"lm loss": "loss", "mtp_1 loss": "MTP loss", "indexer loss": "indexer loss"}
TROUBLES = ("number of skipped iterations", "number of nan iterations")
VALIDATION = re.compile(r" validation loss at .* lm loss value: (\S+)")
SAVED = re.compile(r" *\[[^]]*\] successfully saved checkpoint from iteration +(\d+)")
WARNING = re.compile(r"WARNING:|^> (warning|removed)")
ERROR = re.compile(r"(ERROR|CRITICAL):|^(\[rank \d+\] )?error: ")
RED, YELLOW, GREEN, CYAN = (f"\x1b[{code}m" for code in (31, 33, 32, 36))


def left(seconds: float) -> str:
    """Return a time in its largest unit."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} left"
    return f"{seconds:.0f} s left"


class Terminal:
    """Printer of permanent lines, and of a progress line that is rewritten in place."""

    def __init__(self, label: str):
        self.label = label
        self.rewrites = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.coloured = self.rewrites and "NO_COLOR" not in os.environ
        self.progress = f"{label}, starting" if self.rewrites else ""
        self.printed = -EVERY
        self._draw()

    def line(self, text: str, colour: str = "") -> None:
        """Print a line above the progress."""
        if self.rewrites:
            print("\r\x1b[K", end="")
        print(f"{colour}{text}\x1b[m" if colour and self.coloured else text, flush=True)
        self._draw()

    def update(self, text: str, last: bool) -> None:
        """Show the progress; keep the line if ``last``."""
        text = f"{self.label}, {text}"
        if self.rewrites:
            self.progress = text[: shutil.get_terminal_size().columns - 1]
            self._draw()
            if last:
                self.end()
        elif last or time.monotonic() - self.printed >= EVERY:
            self.printed = time.monotonic()
            print(text, flush=True)

    def end(self) -> None:
        """Keep the progress line and continue below."""
        if self.progress:
            print(flush=True)
        self.progress = ""

    def _draw(self) -> None:
        if self.progress:
            colour, off = (CYAN, "\x1b[m") if self.coloured else ("", "")
            label, rest = self.progress[: len(self.label)], self.progress[len(self.label) :]
            print(f"\r{colour}{label}{off}{rest}\x1b[K", end="", flush=True)


def progress_of(line: re.Match[str], first: bool) -> tuple[str, bool]:
    """Return the progress in a Megatron log line, and whether the line is the last.

    The ``first`` step after a start includes compilation, so it gives no estimate.
    """
    step, last = int(line[1]), int(line[2])
    values = dict(part.strip().split(": ", 1) for part in line[3].split(" |") if ": " in part)
    parts = [f"step {step}/{last}"]
    parts += [
        f"{word} {float(values[name]):.2f}" for name, word in LOSSES.items() if name in values
    ]
    seconds = float(values["elapsed time per iteration (ms)"]) / 1000
    parts.append(f"{seconds:.2g} s a step")
    if not first and step < last:
        parts.append(left(seconds * (last - step)))
    parts += [
        f"{values[name].strip()} {name.removeprefix('number of ')}"
        for name in TROUBLES
        if int(values.get(name, 0))
    ]
    return ", ".join(parts), step == last


def main() -> None:
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    terminal, first = Terminal(sys.argv[1]), True
    for line in sys.stdin:
        if iteration := ITERATION.match(line):
            with contextlib.suppress(KeyError, ValueError):  # two processes wrote one line
                terminal.update(*progress_of(iteration, first))
                first = False
        elif found := VALIDATION.match(line):
            terminal.line(f"validation loss {float(found[1]):.3f}", GREEN)
        elif found := SAVED.match(line):
            terminal.line(f"saved step {found[1]}")
        elif ERROR.search(line):
            terminal.line(line.rstrip(), RED)
        elif WARNING.search(line):
            terminal.line(line.rstrip(), YELLOW)
    terminal.end()


if __name__ == "__main__":
    main()

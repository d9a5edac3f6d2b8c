"""Command ``report``."""

import argparse

from megatron_dsa.errors import require
from megatron_dsa.extras.report.events import find_runs, missing_package, printable, read_run


def run(arguments: argparse.Namespace) -> int:
    """Read the runs and write the report; return the exit code.

    Raises:
        ConfigError: no scalars to read, or an output is neither .html nor .png.
        VersionError: packages are missing.
    """
    folders, outputs = arguments.folders, arguments.output
    for path in outputs:
        ending = path.suffix in (".html", ".png")
        require(ending, f"--output must end in .html or .png, got {path}")
        require(path.parent.is_dir(), f"--output {path}: there is no folder {path.parent}, make it")
    try:
        from megatron_dsa.extras.report.page import write_html, write_png
    except ImportError as error:
        raise missing_package("matplotlib and jinja2") from error
    found = [read_run(name, folder) for name, folder in find_runs(folders).items()]
    runs = [run for run in found if run.scalars]
    require(
        runs,
        f"{', '.join(map(str, folders))}: no run holds scalars yet, they come with a run's first "
        "logged steps (--log-interval, --tensorboard-log-interval)",
    )
    for run in found:
        if not run.scalars:
            print(f"left out: {run.name} holds no scalars")
    title = printable(arguments.title)
    for path in outputs:
        (write_html if path.suffix == ".html" else write_png)(runs, title, path)
        print(f"{path}: {len(runs)} run(s): {', '.join(run.name for run in runs)}")
    return 0

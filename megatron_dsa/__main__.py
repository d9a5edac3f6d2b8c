"""Command line ``python -m megatron_dsa``."""

import io
import os
import sys

from megatron_dsa.training.entry_errors import report_errors
from megatron_dsa.training.files.system_errors import naming
from megatron_dsa.training.quiet_output import silence_host_warnings

#: Imported module -> distribution that provides it.
_NEEDED = {"torch": "torch", "megatron": "megatron-core", "megatron.core": "megatron-core"}


def main() -> int:
    """Run the command line; if torch or megatron-core is missing, print how to install it."""
    silence_host_warnings()
    try:
        # Importing the command line needs torch.
        from megatron_dsa.extras import cli

        with report_errors():
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # not all paths are valid text
            status = cli.main()
            with naming("standard output"):
                sys.stdout.flush()
        return status
    except SystemExit:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        raise
    except BrokenPipeError:
        _drop_output()  # the pipe's reader, such as ``head``, has exited
        return 1
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        print(
            f"python -m megatron_dsa needs {_NEEDED[error.name]}, which {sys.executable} does not "
            "have: take the environment that the scripts set up (source .venv/bin/activate), or "
            "install it (in a clone: pip install -e '.[train]')",
            file=sys.stderr,
        )
        return 1


def _drop_output() -> None:
    """Discard output that the interpreter would flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())

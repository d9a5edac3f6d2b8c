"""``python -m megatron_dsa``: see :mod:`megatron_dsa.tools.cli`."""

import os
import sys

from megatron_dsa.training.entry_errors import told_in_a_sentence
from megatron_dsa.training.host_warnings import silence_host_warnings

#: What commands cannot do without: module -> distribution. Other distributions may hold a part of
#: ``megatron``.
_NEEDED = {"torch": "torch", "megatron": "megatron-core", "megatron.core": "megatron-core"}


def main() -> int:
    """Run the command line; say what to install where torch or megatron-core is missing.

    What users can mend ends the process with a sentence and exit code 2.

    Raises:
        ModuleNotFoundError: of any other module, or of a part of one of these: not for the user to
            mend.
    """
    silence_host_warnings()
    try:
        # Commands import torch where they are made known, before any of them is run.
        from megatron_dsa.tools import cli

        with told_in_a_sentence():
            status = cli.main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # ``head`` has read enough; the interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


if __name__ == "__main__":
    raise SystemExit(main())

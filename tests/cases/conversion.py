"""The scripts of ``examples/conversion``, as modules."""

import importlib
import sys

from tests.cases.launch_scripts import EXAMPLES

FOLDER = EXAMPLES / "conversion"


def module(name):
    """Return a script as a module; scripts import each other by name."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))

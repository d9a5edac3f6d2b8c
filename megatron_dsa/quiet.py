"""Silence warnings of the host that its users cannot act on, before the first useful line.

Users who set warning options (``PYTHONWARNINGS=default``, ``python -W default``) see all of them.
"""

from __future__ import annotations

import logging
import sys
import warnings

#: What the host warns of at every start: start of the message (a regular expression), category.
_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # Optional packages of the host; `python -m megatron_dsa info` lists those that matter here.
    ("Transformer Engine and Apex are not installed", UserWarning),
    ("Apex is not installed", UserWarning),
    ("Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0", UserWarning),
    # The host's own code.
    (r"invalid escape sequence '\\-'", SyntaxWarning),
    ("MimoModelConfig is experimental", UserWarning),
    # The host pins memory without looking for a GPU.
    ("'pin_memory' argument is set as true but no accelerator is found", UserWarning),
)

#: The same of the log: logger, start of the message.
_RECORDS = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
)


def silence_host() -> None:
    """Ignore exactly these warnings, unless the user asked for warnings; call it before imports.

    Calling it again changes nothing.
    """
    if sys.warnoptions:
        return
    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    for name, start in _RECORDS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Unless) for each in logger.filters):
            logger.addFilter(_Unless(start))


class _Unless(logging.Filter):
    """Drops records whose message begins with a text."""

    def __init__(self, start: str):
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)

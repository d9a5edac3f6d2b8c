"""Write the API reference from the docstrings.

python scripts/api_reference.py                # to the standard output
python scripts/api_reference.py build/api.md   # to a file, which git ignores
"""

import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import ForwardRef

from megatron_dsa.config.fields import option_fields
from megatron_dsa.training.files.whole import whole_file

#: The public modules in page order; ``docs/design/architecture.md`` also lists them.
MODULES = (
    "dsa_kernels",
    "extras.torch_library",
    "pretrain",
    "arguments",
    "ops.compressor.api",
    "ops.kda.api",
    "ops.hyper_connections.api",
    "ops.rope.api",
    "ops.layout.layout",
    "specs",
    "csa",
    "config.options",
    "config.transformer",
    "config.presets",
    "layers.freezing",
    "training.checkpoints",
    "training.data",
    "extras.huggingface.convert",
    "extras.rl.replay",
    "extras.rl.rollouts",
    "extras.rl.agreement",
    "metrics.quality",
    "metrics.flops",
    "ops.dispatch.operation",
    "ops.dispatch.policy",
    "ops.dispatch.support",
    "errors",
)
#: Longer signatures, of Megatron's configurations, are omitted.
LONGEST_SIGNATURE = 1500


def public(module) -> list:
    """Return a module's classes and functions: in ``__all__``, or defined in the module."""
    if hasattr(module, "__all__"):
        found = [getattr(module, name) for name in module.__all__]
        return [value for value in found if is_documented(value)]
    own = [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and is_documented(value) and value.__module__ == module.__name__
    ]
    return sorted(own, key=lambda value: inspect.getsourcelines(inspect.unwrap(value))[1])


def is_documented(value) -> bool:
    """Return whether a value is a class or function, decorated or not."""
    return inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))


def type_name(annotation) -> str:
    """Return an annotation as it was written."""
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def default_name(value) -> str:
    """Return a default as short text, ``...`` for functions and factories."""
    if is_dataclass(value):
        return f"{type(value).__name__}()"
    return "..." if callable(value) or repr(value).startswith("<") else repr(value)


def parameter(value: inspect.Parameter) -> str:
    stars = {value.VAR_POSITIONAL: "*", value.VAR_KEYWORD: "**"}.get(value.kind, "")
    text = stars + value.name
    if value.annotation is not value.empty:
        text += f": {type_name(value.annotation)}"
    if value.default is not value.empty:
        text += f" = {default_name(value.default)}"
    return text


def signature(value) -> str:
    """Return the wrapped signature of a class or function, or only its name."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return value.__name__
    found = inspect.signature(value)
    parameters = [parameter(p) for p in found.parameters.values()]
    arrow = ""
    if not inspect.isclass(value) and found.return_annotation is not found.empty:
        arrow = f" -> {type_name(found.return_annotation)}"
    call = f"{value.__name__}({', '.join(parameters)}){arrow}"
    if len(call) > LONGEST_SIGNATURE:
        return value.__name__
    if len(call) <= 100:
        return call
    lines = "".join(f"    {text},\n" for text in parameters)
    return f"{value.__name__}(\n{lines}){arrow}"


def options(value: type) -> list[str]:
    """Return the help text of each configuration field that has a flag."""
    fields = option_fields(value) if is_dataclass(value) else ()
    return [f".{each.name} ({about.flag})\n    {about.help}" for each, about in fields]


def entry(value) -> str:
    """Return heading, signature and docstring of a class with its methods, or of a function."""
    parts = [signature(value), inspect.cleandoc(value.__doc__ or "")]
    if inspect.isclass(value):
        parts += options(value)
        for name, member in vars(value).items():
            if name.startswith("_") or not getattr(member, "__doc__", None):
                continue
            if inspect.isfunction(member):
                parts.append(f".{signature(member)}\n    " + member.__doc__.strip().split("\n")[0])
    return f"### {value.__name__}\n\n```text\n" + "\n\n".join(filter(None, parts)) + "\n```\n"


def page() -> str:
    parts = ["# API\n\nWritten from the docstrings by `python scripts/api_reference.py`.\n"]
    for name in MODULES:
        module = importlib.import_module(f"megatron_dsa.{name}")
        summary = inspect.cleandoc(module.__doc__).split("\n\n")[0]
        parts.append(f"## megatron_dsa.{name}\n\n{summary}\n")
        parts += [entry(value) for value in public(module)]
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        print(page(), end="")
        return
    output = Path(arguments[0])
    with whole_file(output) as file:
        file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

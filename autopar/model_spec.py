"""A model named on the command line: module:callable."""

import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn

from autopar.errors import AutoparError

MODEL_HELP = (
    "module:callable; called without arguments it returns the model, (model, batch) or "
    "(model, batch, loss). The module is looked for in the current folder first"
)


def load_model(spec: str) -> tuple[nn.Module, Any, Any]:
    """(model, batch or None, loss or None) of "module:callable". Runs the user's code.

    Errors: AutoparError for a spec that names nothing, and for a callable that returns anything
    else; what the user's own code raises is not touched.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise AutoparError(f"{spec!r} isn't of the form module:callable")
    module = _import(module_name)
    build = getattr(module, attribute, None)
    if not callable(build):
        raise AutoparError(f"{spec!r}: {module_name} has no callable {attribute!r}")
    made = build()
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise AutoparError(
            f"{spec!r} returned {kinds}: it must return the model, (model, batch) or "
            "(model, batch, loss)"
        )
    model, batch, loss = (*parts, None, None)[:3]
    return model, batch, loss


def _import(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise AutoparError(f"there is no module {name!r} here or among the installed") from error
    finally:
        sys.path.remove(str(Path.cwd()))

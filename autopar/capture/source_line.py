"""Where in the user's code a node of a captured graph comes from."""

import os
import re

import torch
import torch.fx

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: torch.fx.Node) -> str:
    """The innermost line outside torch, "model.py:12": no folder, since a plan holds no paths."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if not file.startswith(_TORCH)]
    if not own:
        return "an unknown line"
    file, line = own[-1]
    return f"{os.path.basename(file)}:{line}"

"""How a layer that runs its own code is written."""

import json
import math
from typing import Any

import torch.fx

from autopar.capture.opaque_code import OpaqueCode, Slot, code_of
from autopar.graph.model_graph import Block
from autopar.layouts.flow import Flow


def opaque_node(block: Block) -> torch.fx.Node | None:
    """The one op of a block that runs a layer's own code, or None for another block."""
    return next((n for n in block.graph.nodes if code_of(n) is not None), None)


def places_lines(flow: Flow) -> list[str]:
    """Where the samples lie, for a layer that runs on a share of them."""
    node = opaque_node(flow.block)
    code = code_of(node) if node is not None else None
    if code is None:
        return []
    lines = [f"    # The model's own code runs: {code.where} can't be exported."]
    if not code.mixing:
        lines.append(f"    INPUT_DIMS = {code.inputs!r}")
        lines.append(f"    OUTPUT_DIMS = {code.outputs!r}")
    return [*lines, ""]


def call_text(code: OpaqueCode, operands: list[str]) -> str:
    """The arguments of a call as Python: tuples, lists, dicts and plain values with texts in."""
    args, kwargs = code.call
    words = [_source(arg, operands) for arg in args]
    words += [f"{key}={_source(value, operands)}" for key, value in kwargs.items()]
    return ", ".join(words)


def _source(value: Any, operands: list[str]) -> str:
    if isinstance(value, Slot):
        return operands[value.index]
    if type(value) is dict:
        pairs = (f"{json.dumps(k)}: {_source(v, operands)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if type(value) in (list, tuple):
        inner = ", ".join(_source(item, operands) for item in value)
        if type(value) is list:
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    return json.dumps(value) if type(value) is str else repr(value)

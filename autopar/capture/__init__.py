"""From an ordinary model to graphs: the one place that touches torch.export."""

from autopar.capture.captured import Capture, CapturedGraph, GraphInput, Layer, ParamMeta
from autopar.capture.program import capture
from autopar.capture.reference import reference_loss

__all__ = [
    "Capture",
    "CapturedGraph",
    "GraphInput",
    "Layer",
    "ParamMeta",
    "capture",
    "reference_loss",
]

"""autopar: an automatic-parallelism compiler for PyTorch."""

from autopar.cluster import ClusterSpec, Device, Link
from autopar.compiled import Compiled
from autopar.compiler import compile, recipe
from autopar.errors import AutoparError, InfeasibleError, OpaqueWarning
from autopar.inspection import inspect
from autopar.plan import Plan
from autopar.reload import emit, load
from autopar.runtime.training import TrainingModule

__all__ = [
    "AutoparError",
    "ClusterSpec",
    "Compiled",
    "Device",
    "InfeasibleError",
    "Link",
    "OpaqueWarning",
    "Plan",
    "TrainingModule",
    "compile",
    "emit",
    "inspect",
    "load",
    "recipe",
]

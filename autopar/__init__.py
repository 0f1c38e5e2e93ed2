"""autopar: an automatic-parallelism compiler for PyTorch."""

from autopar.cluster import ClusterSpec, Device, Link
from autopar.compiler import Compiled, compile
from autopar.errors import AutoparError, InfeasibleError
from autopar.plan import Plan
from autopar.runtime.training import TrainingModule

__all__ = [
    "AutoparError",
    "ClusterSpec",
    "Compiled",
    "Device",
    "InfeasibleError",
    "Link",
    "Plan",
    "TrainingModule",
    "compile",
]

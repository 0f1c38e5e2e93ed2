"""Which algorithms there are for each collective, and which of them a library has."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.cost_models import collective_algorithms as flat
from autopar.cost_models import collective_compositions as composed
from autopar.cost_models.topology import Route

Algorithm = Callable[[Route, float], float | None]

_GATHER: Mapping[str, Algorithm] = MappingProxyType(
    {
        "tree": flat.tree_gather,
        "linear": flat.linear,
        "direct": composed.direct,
        "torus": composed.torus_pass,
    }
)
ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": flat.ring_all_reduce,
            "tree": flat.tree_all_reduce,
            "butterfly": flat.butterfly,
            "rabenseifner": flat.rabenseifner,
            "double_tree": flat.double_tree,
            "hierarchical_tree": flat.hierarchical_tree,
            "in_switch": flat.in_switch,
            "direct": composed.direct_reduce,
            "torus": composed.torus_twice,
        },
        "all_gather": {
            "ring": flat.ring_pass,
            "butterfly": flat.doubling,
            "direct": composed.direct,
            "torus": composed.torus_pass,
        },
        "reduce_scatter": {
            "ring": flat.ring_pass,
            "butterfly": flat.halving,
            "direct": composed.direct_sum,
            "torus": composed.torus_pass,
        },
        "broadcast": {
            "tree": flat.tree,
            "chain": flat.chain,
            "scatter_all_gather": flat.scatter_all_gather,
            "direct": composed.direct_broadcast,
            "torus": composed.torus_twice,
        },
        "reduce": {
            "tree": flat.tree_reduce,
            "chain": flat.chain,
            "ring": flat.ring_reduce,
            "direct": composed.direct_reduce,
            "torus": composed.torus_twice,
        },
        "gather": _GATHER,
        "scatter": _GATHER,
        "all_to_all": {
            "pairwise": flat.pairwise,
            "bruck": flat.bruck,
            "direct": composed.direct,
            "torus": composed.torus_all_to_all,
        },
        "send": {"direct": flat.send, "torus": composed.torus_send},
    }
)
"""Closed forms by op and name. Those by levels, `hierarchical` (all ops but send) and
`hierarchical_sharded` (all-reduce), are composed of these."""

IN_TREES = frozenset({"tree", "double_tree", "hierarchical_tree"})
"""Algorithms whose messages go at a protocol's tree figures."""

LIBRARIES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # pytorch/gloo@081799c: allreduce.cc (its default), allgather.cc, broadcast.cc, reduce.cc,
        # gather.cc, scatter.cc, alltoall.cc.
        "gloo": {
            "all_reduce": ("ring",),
            "all_gather": ("ring",),
            "broadcast": ("tree",),
            "reduce": ("ring",),
            "gather": ("linear",),
            "scatter": ("linear",),
            "all_to_all": ("pairwise",),
            "send": ("direct",),
        },
        # NVIDIA/nccl@5067397 src/graph/tuning.cc; gather, scatter and all-to-all are grouped sends.
        # RCCL, which torch calls nccl too, has the same.
        "nccl": {
            "all_reduce": ("ring", "double_tree", "hierarchical_tree", "in_switch"),
            "all_gather": ("ring",),
            "reduce_scatter": ("ring",),
            "broadcast": ("chain",),
            "reduce": ("chain",),
            "gather": ("linear", "direct"),
            "scatter": ("linear", "direct"),
            "all_to_all": ("pairwise", "direct"),
            "send": ("direct",),
        },
    }
)
"""What a backend of torch.distributed has of these, by op; any other backend is taken to have all
that the topology offers."""

STANDS_FOR: Mapping[tuple[str, str], str] = MappingProxyType(
    {("gloo", "reduce_scatter"): "all_reduce"}
)
"""What a backend does by another op: gloo all-reduces, of which each rank keeps its part (torch's
ProcessGroupGloo.cpp, and it takes the same time)."""

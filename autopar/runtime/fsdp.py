"""ZeRO stage 3 by torch's FSDP2."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import _pytree as pytree

from autopar.runtime.parameters import Container, Sharded
from autopar.runtime.process_mesh import Group


def shard_fully(module: Container, axes: Sequence[str], names: Sequence[str]) -> None:
    """Shards the parameters `names` that `module` declared on dim 0 over the group of `axes`.

    They are all-gathered before the module's forward and again in its backward; each backward
    ends in one reduce-scatter, a sum, that adds to the sharded gradients. The module's other
    parameters are left alone. At most once a module, layers before what holds them; a collective.
    """
    group = open_shards(module, 3, axes, names)
    if group.size == 1:
        return
    managed = {module.get_parameter(name) for name in names}
    wrapped: Any = fully_shard(  # in place: its class becomes a subclass of FSDPModule as well
        module,
        mesh=group.device_mesh,
        reshard_after_forward=True,
        ignored_params=set(module.parameters()) - managed,
    )
    # FSDP2 averages: sums need both, since gloo has no scaled sum in float32.
    wrapped.set_gradient_divide_factor(1.0)
    wrapped.set_force_sum_reduction_for_comms(True)
    wrapped.register_forward_hook(_no_backward)


def open_shards(
    module: Container, stage: Literal[1, 2, 3], axes: Sequence[str], names: Sequence[str]
) -> Group:
    """Opens the group of `axes` and records the parameters that it shards: none over one rank."""
    mesh = module.mesh
    mesh.open([tuple(axes)])
    group = mesh[tuple(axes)]
    for name in names if group.size > 1 else ():
        declaration = module.declarations[name]
        if declaration.trainable:
            missing = set(group.axes) - set(declaration.sums)
            assert not missing, f"{name}'s gradient is not summed over {sorted(missing)}"
        else:
            assert stage == 3, f"{name} is frozen: it has nothing but a value to shard"
            cut = declaration.axes & set(group.axes)
            assert not cut, f"{name} is cut over {sorted(cut)} already"
        assert name not in module.sharded, f"{name} is sharded twice"
        module.sharded[name] = Sharded(group.axes, stage)
    return group


def close_root(root: Container) -> None:
    """Makes `root` the one root of all FSDP2 modules below it, if there are any, so that they share
    streams and prefetch.
    """
    axes_of = {
        one: sharded.axes
        for one in root.modules()
        if isinstance(one, Container)
        for sharded in one.sharded.values()
        if sharded.stage == 3
    }
    if axes_of and root not in axes_of:
        shard_fully(root, axes=next(iter(axes_of.values())), names=())


def _no_backward(module: FSDPModule, inputs: Any, outputs: Any) -> None:
    """After the forward of a module that no gradient comes back to (frozen, before all that is
    trained): it isn't part of the order of the backward, which would gather it again."""
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        return
    state: Any = module._get_fsdp_state()
    for group in _param_groups(state):
        order = state._comm_ctx.post_forward_order
        if group._post_forward_indices and order[-1] is group:
            group._post_forward_indices.pop()
            order.pop()


def forget_forward(root: Container) -> None:
    """Drops what FSDP2 remembers of a forward that no backward follows (an evaluation).

    It records the order of forwards for the prefetches of the backward and clears it only there;
    with a stale order the next step would gather a layer once too often.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            for group in _param_groups(state):
                group._post_forward_indices.clear()


def _param_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11

"""Where ops come from: the paths of modules that a region has ops in."""

from autopar.graph.model_graph import Block


def region_paths(block: Block, region: str, layer: str) -> tuple[str, ...]:
    """Full paths of the modules in which a region's ops were traced, the layer's own included.

    `layer` is the instance's path ("" for the skeleton).
    """
    found: dict[str, None] = {layer: None} if layer else {}
    for op in block.ops.values():
        if op.region == region:
            for entry in (op.node.meta.get("nn_module_stack") or {}).values():
                path = str(entry[0])
                full = f"{layer}.{path}" if layer and path else layer or path
                if full:
                    found[full] = None
    return tuple(found)

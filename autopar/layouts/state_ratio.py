"""What training keeps for each element of a parameter, beside its value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateRatio:
    """`elements` of optimizer state for each element of a parameter, of `item_bytes` each (0: the
    parameter's). `master_bytes`: of the copy in higher precision that the optimizer steps (0:
    none). `gradient_bytes`: of gradients as they accumulate and are summed over ranks (0: the
    parameter's). `gathers_master`: where values are sharded (ZeRO 3), the master copies are the
    shards, and values are gathered from them in the parameter's type. `adds_in_products`: the
    kernels that make gradients add them to what is there (others' programs; this one's don't).

    Adam in the usual mixed recipes keeps 16 bytes for each 2-byte element (fp16 gradients, master
    copy, two moments), 18 with fp32 gradients, 20 with both (Rajbhandari et al. 2020; Shoeybi et
    al. 2019).
    """

    elements: float
    item_bytes: int = 0
    master_bytes: int = 0
    gradient_bytes: int = 0
    gathers_master: bool = False
    adds_in_products: bool = False

    def state_bytes(self, item: int) -> float:
        """Of optimizer state, for an element of `item` bytes."""
        return self.elements * (self.item_bytes or item)

    def gradient_item(self, item: int) -> int:
        """Bytes of an element's gradient."""
        return self.gradient_bytes or item

    def stepped_bytes(self, item: int) -> float:
        """What a step of the optimizer reads and writes: the gradient, state and value; of a master
        copy, both ways, and the value made from it."""
        values = 2 * self.master_bytes + item if self.master_bytes else 2 * item
        return self.gradient_item(item) + 2 * self.state_bytes(item) + values

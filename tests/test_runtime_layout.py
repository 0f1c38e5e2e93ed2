"""Which indices of a whole dim each rank holds."""

import pytest
import torch

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.runtime import Container, ProcessMesh, cat, declare, declare_layers, split
from autopar.runtime.layout import Dim, local_indices, local_shape, put, take, whole_size

MESH = Mesh((("dp", 2), ("tp", 3)))


def held(dim: Dim, rank: int) -> list[int]:
    indices: list[int] = local_indices(dim, MESH, MESH.coordinate(rank)).tolist()
    return indices


def test_split_over_one_axis() -> None:
    assert [held(split(6, "tp"), rank) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_first_axis_is_outermost() -> None:
    assert [held(split(6, "dp", "tp"), rank) for rank in range(6)] == [[i] for i in range(6)]
    assert [held(split(6, "tp", "dp"), rank)[0] for rank in range(6)] == [0, 2, 4, 1, 3, 5]


def test_products_are_major_first() -> None:
    assert held((split(3, "tp"), 2), 1) == [2, 3]
    assert held((2, split(3, "tp")), 1) == [1, 4]
    assert held((split(2, "dp"), split(3, "tp"), 2), 5) == [10, 11]


def test_segments_are_cut_apart() -> None:
    unequal = cat((split(6, "tp"), 2), (split(3, "tp"), 2), 1)
    assert whole_size(unequal) == 19
    assert held(unequal, 2) == [8, 9, 10, 11, 16, 17, 18]
    assert held((split(2, "dp"), cat(1, split(3, "tp"))), 4) == [4, 6]


DIMS: tuple[Dim, ...] = (cat(split(6, "dp"), 2), 3, (split(3, "tp"), 4))


def test_parts_cover_the_whole() -> None:
    whole = torch.arange(8 * 3 * 12).reshape(8, 3, 12)
    found = torch.zeros_like(whole)
    for rank in range(MESH.world):
        part = take(whole, DIMS, MESH, MESH.coordinate(rank))
        assert part.shape == local_shape(DIMS, MESH) == (5, 3, 4)
        put(found, part, DIMS, MESH, MESH.coordinate(rank))
    assert torch.equal(found, whole)


def test_uneven_split_is_refused() -> None:
    with pytest.raises(AssertionError, match="7 elements don't fall into 3 pieces"):
        held(split(7, "tp"), 0)


class Holder(Container):
    def __init__(self) -> None:
        super().__init__()
        self.mesh = ProcessMesh((("tp", 1),))


def test_names_are_paths() -> None:
    holder, layer = Holder(), Holder()
    declare(layer, "attn.weight", 4, split(6, "tp"), sums=())
    declare_layers(holder, "model.h", [layer, Holder()])
    declare(holder, "model.0.bias", 3, dtype=torch.bfloat16, trainable=False)
    declare(holder, "model.mask", 2, dtype=torch.bool, buffer=True, persistent=False)
    names = [name for name, _ in holder.named_parameters()]
    assert names == ["model.h.0.attn.weight", "model.0.bias"]
    model = holder.get_submodule("model")
    assert isinstance(model, Container) and len(list(model.get_submodule("h").children())) == 2
    assert model[0].get_parameter("bias").dtype == torch.bfloat16
    assert not model[0].get_parameter("bias").requires_grad
    assert layer.declarations["attn.weight"].shape == (4, 6) and not holder.state_dict().keys() & {
        "model.mask"
    }


def test_name_of_our_own_is_refused() -> None:
    with pytest.raises(AutoparError, match="The model's name 'mesh' is taken"):
        declare(Holder(), "mesh.weight", 4)


def test_split_and_summed_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"cut over .'tp'. and summed over them"):
        declare(Holder(), "weight", split(4, "tp"), sums=("tp",))

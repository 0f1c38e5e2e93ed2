"""Ops that a strategy runs in its own way: what it sees of them, and what it says."""

from dataclasses import dataclass
from typing import Literal

from autopar.mesh import Split


@dataclass(frozen=True)
class Attention:
    """A scaled-dot-product attention, `op`, by its named dims: those of the sequence that queries
    and keys have ("" where that is no single dim), and those of the queries' and the keys' heads,
    major first. `drops`: it drops attention weights at random in training."""

    op: str
    queries: str
    keys: str
    heads: tuple[str, ...]
    key_heads: tuple[str, ...]
    causal: bool
    masked: bool
    drops: bool


@dataclass(frozen=True)
class Exchange:
    """What an op in a form of its own communicates over the form's axes, once a microbatch:
    `times` collectives, each of all the op's arguments named in `of`, as it takes them. `wide`: in
    float32 at least."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    phase: Literal["forward", "backward"]
    of: tuple[str, ...]
    times: int
    wide: bool = False


@dataclass(frozen=True)
class OpForm:
    """How one op of a region is run.

    `moves`: (dim, other, axes): in this op the axes split `other`, innermost, instead of `dim`.
    `function` ("package.module:name") is imported by the emitted module and called with the op's
    own arguments and `axis=group` of `axes`; "" for the op's own. `frees`: dims that the op needs
    whole and this function takes split over `axes`; arguments in `whole` it takes whole all the
    same. It works `passes` times on what it takes, and holds `copies` times the arguments that it
    exchanges.
    """

    op: str
    axes: Split
    moves: tuple[tuple[str, str, Split], ...] = ()
    function: str = ""
    frees: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    passes: int = 1
    copies: int = 0
    exchanges: tuple[Exchange, ...] = ()

    def allows(self, dim: str) -> bool:
        """Whether a region may split a dim that the op needs whole."""
        return dim in self.frees or any(dim == moved for moved, _, _ in self.moves)

    def leaves_whole(self, dim: str, region: tuple[tuple[str, Split], ...]) -> bool:
        """Whether the op has a dim whole, or split over axes that its function takes, where the
        region splits dims so."""
        free = self.axes if dim in self.frees else ()
        return set(dict(self.splits(region)).get(dim, ())) <= set(free)

    def splits(self, region: tuple[tuple[str, Split], ...]) -> tuple[tuple[str, Split], ...]:
        """How dims are split in this op, where the region splits them so."""
        out = dict(region)
        for dim, other, axes in self.moves:
            out[dim] = tuple(part for part in out.get(dim, ()) if part not in axes)
            out[other] = (*out.get(other, ()), *axes)
        return tuple((dim, split) for dim, split in sorted(out.items()) if split)

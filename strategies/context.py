"""Context parallelism: every rank along cp takes its share of every sequence's positions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import (
    AutoparError,
    AxisSpec,
    Candidate,
    Dim,
    Exchange,
    Mesh,
    OpForm,
    Refusal,
    Region,
    Schedule,
    Strategy,
    split_over,
    split_size,
)

FORMS = ("ring", "all_to_all")
RING = "autopar.runtime.context:ring_attention"


@dataclass(frozen=True)
class Context(Strategy):
    """Splits the sequence over cp in every region, the embedding and the loss included. Of 2 · cp
    chunks rank i holds the i-th from the beginning and the i-th from the end, so that all have the
    same work under a causal mask. Attention is run in one of two ways, `form` (None leaves the
    choice to the planner):

    "ring": keys and values travel round the ranks, and what each block of them gives is merged
    (Liu et al. 2023, ring attention; the balance: Brandon et al. 2023, striped attention, and Llama
    3's training). Communication: cp - 1 sends of keys and values in the forward; in the backward
    those again, and as many of their gradients.

    "all_to_all": heads are exchanged for positions before attention and back after it (Jacobs et
    al. 2023, DeepSpeed-Ulysses). Communication: all-to-alls of queries, keys, values and results.

    Gradients of all weights are summed over cp.
    """

    form: str | None = None
    name: ClassVar[str] = "context"

    def __post_init__(self) -> None:
        if self.form is not None and self.form not in FORMS:
            raise AutoparError(
                f"context has no form {self.form!r}: there are {' and '.join(FORMS)}, and False "
                "for none"
            )

    def axes(self) -> tuple[AxisSpec, ...]:
        """cp, between dp and ep: its traffic is attention's alone, but once a microbatch."""
        return (AxisSpec("cp", splits_batch=False, locality=40),)

    def misfit(self, regions: Iterable[Region], mesh: Mesh) -> str | None:
        """Without attention that can be run along cp, sequences would be gathered for nothing."""
        size = mesh.size("cp")
        if size == 1:
            return None
        reasons: dict[str, None] = {}
        for region in regions:
            if not region.attention:
                continue
            for one in self._with_attention(Candidate(region.name), region, mesh):
                if isinstance(one, Candidate):
                    return None
                reasons[one.reason] = None
        why = "; ".join(reasons) or "the model has no attention over a sequence that can be split"
        return f"cp = {size}: {why}"

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with the region's sequence split over cp, and its attention in a form."""
        if mesh.size("cp") == 1 or candidate.uses("cp"):
            return
        if region.attention:
            yield from self._with_attention(candidate, region, mesh)
            return
        sequence = _sequence(region)
        if isinstance(sequence, Refusal):
            yield sequence
        else:
            yield split_over(self.name, candidate, region, sequence, "cp", mesh, balanced=True)

    def _with_attention(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterator[Candidate | Refusal]:
        sequence = _sequence(region)
        if isinstance(sequence, Refusal):
            yield sequence
            return
        if any(a.queries != sequence.name or a.keys != sequence.name for a in region.attention):
            yield Refusal(
                f"region {region.name}: its queries and keys aren't of one sequence, "
                f"{sequence.name}"
            )
            return
        for form in FORMS if self.form is None else (self.form,):
            for made in _rings(region, mesh) if form == "ring" else _swaps(region, mesh):
                if isinstance(made, Refusal):
                    yield made
                    continue
                formed = candidate.with_forms(self.name, made, form=form)
                yield split_over(
                    self.name, formed, region, sequence, "cp", mesh, balanced=True, form=form
                )

    def conflict(
        self, candidate: Candidate, region: Region, mesh: Mesh, schedule: Schedule | None = None
    ) -> str | None:
        """Queries that share a head of keys are exchanged for positions only where a rank has one
        such head: else heads of keys are."""
        sizes = {dim.name: dim.size for dim in region.dims}
        heads = {seen.op: seen.heads for seen in region.attention}
        for form in candidate.forms:
            for _, moved, _ in form.moves:
                for before in heads[form.op][: heads[form.op].index(moved)]:
                    local = sizes[before] // split_size(candidate.split(before))
                    if local > 1:
                        return (
                            f"region {region.name}: all_to_all takes {moved} only where a rank has "
                            f"one of {before}, not {local}"
                        )
        return None


def _sequence(region: Region) -> Dim | Refusal:
    found = [dim for dim in region.dims if dim.role == "sequence"]
    if len(found) == 1:
        return found[0]
    if not found:
        return Refusal(f"region {region.name} has no sequence dim")
    names = ", ".join(dim.name for dim in found)
    return Refusal(f"region {region.name} has several sequences ({names}): they can't all be split")


def _rings(region: Region, mesh: Mesh) -> Iterator[list[OpForm] | Refusal]:
    """Ring attention for each op of the region."""
    dropping = [seen.op for seen in region.attention if seen.drops]
    if dropping:
        yield Refusal(
            f"region {region.name}: {dropping[0]} drops attention weights, which ring attention "
            "doesn't: take all_to_all, or no dropout of attention"
        )
        return
    size, taken = mesh.size("cp"), ("key", "value")
    yield [
        OpForm(
            seen.op,
            (mesh.part("cp"),),
            function=RING,
            frees=(seen.queries,),
            whole=("attn_mask",),
            passes=size,
            copies=2,
            exchanges=(
                Exchange("send", "forward", taken, size - 1),
                Exchange("send", "backward", taken, size - 1),
                Exchange("send", "backward", taken, size - 1, wide=True),
            ),
        )
        for seen in region.attention
    ]


def _swaps(region: Region, mesh: Mesh) -> Iterator[list[OpForm] | Refusal]:
    """Heads for positions, in each op of the region: heads of keys, or else the queries that share
    one."""
    size, axes = mesh.size("cp"), (mesh.part("cp"),)
    sizes = {dim.name: dim.size for dim in region.dims}
    depth = max(len(seen.heads) for seen in region.attention)
    found = False
    for place in range(depth):
        heads = [seen.heads[place] for seen in region.attention if len(seen.heads) > place]
        if len(heads) == len(region.attention) and all(sizes[h] % size == 0 for h in heads):
            found = True
            yield [
                OpForm(seen.op, axes, moves=((seen.queries, head, axes),))
                for seen, head in zip(region.attention, heads, strict=True)
            ]
    if not found:
        every = dict.fromkeys(h for seen in region.attention for h in seen.heads)
        have = " · ".join(f"{h} = {sizes[h]}" for h in every) or "its attention has no heads"
        yield Refusal(
            f"region {region.name}: {have} can't be divided among cp = {size} ranks, as all_to_all "
            "needs it; ring doesn't"
        )

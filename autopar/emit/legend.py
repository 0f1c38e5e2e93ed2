"""What calls of the runtime communicate that aren't collectives by name."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

INSIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab_embedding": (
            "vocab_embedding communicates nothing: its result is partial over its axis.",
        ),
        "vocab_cross_entropy": (
            "vocab_cross_entropy all-reduces the maxima of the logits in one call, then two sums",
            "of each row in one more; nothing in the backward.",
        ),
        "sync_batch_norm": (
            "sync_batch_norm all-gathers means and variances in one call in training, and",
            "all-reduces two sums of each channel in one call in the backward.",
        ),
        "dispatch": (
            "route sends the numbers of each expert's rows to the ranks of its axis by all-to-all;",
            "dispatch sends the rows there and combine brings them back, each by an all-to-all in",
            "the forward and one in the backward.",
        ),
    }
)


def inside(used: Collection[str]) -> Iterator[str]:
    """The lines for what a module uses."""
    for name, lines in INSIDE.items():
        if name in used:
            yield from lines

"""Factor rules by op class: which input dims are which output dims, which are contracted, and
which must stay whole.

A rule joins factors (see `autopar.graph.factors`) and returns `OpDims`. An op without a rule, or
used in a way that its rule does not cover, is opaque: it runs whole.
"""

from autopar.graph.rules import (
    elementwise,
    indexing,
    norms,
    products,
    reductions,
    shapes,
    tokens,
    windows,
)
from autopar.graph.rules.base import Dims, Known, OpDims, Rule
from autopar.graph.rules.shapes import untraced_cut

__all__ = ["RULES", "Dims", "Known", "OpDims", "Rule", "untraced_cut"]

RULES: dict[str, Rule] = {
    "pointwise": elementwise.pointwise,
    "channelwise": elementwise.channelwise,
    "feature_dropout": elementwise.feature_dropout,
    "scan": elementwise.scan,
    "difference": elementwise.difference,
    "buffer_update": elementwise.buffer_update,
    "constant": elementwise.constant,
    "contraction": products.contraction,
    "attention": products.attention,
    "embedding": products.embedding,
    "normalisation": norms.normalisation,
    "batch_norm": norms.batch_norm,
    "channel_norm": norms.channel_norm,
    "reduction": reductions.reduction,
    "loss": reductions.loss,
    "convolution": windows.convolution,
    "window": windows.window,
    "index": indexing.index,
    "view": shapes.view,
    "permute": shapes.permute,
    "concat_split": shapes.concat_split,
    "repeat": shapes.repeat,
    "repeat_interleave": tokens.repeat_interleave,
    "top_k": tokens.top_k,
    "sort": tokens.sort,
    "search": tokens.search,
    "scatter": tokens.scatter,
    "index_add": tokens.index_add,
    "index_put": tokens.index_put,
    "count": tokens.count,
    "grouped": tokens.grouped,
    "pad": shapes.pad,
    "getitem": shapes.getitem,
}

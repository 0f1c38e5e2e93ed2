"""A GPT-2 block's regions by hand, as planning would hand them to the strategies."""

from autopar.mesh import Mesh
from autopar.plugin import Candidate, Dim, ParamInfo, Refusal, Region, Role, Strategy

BATCH, SEQUENCE, HIDDEN, HEADS, FFN = 8, 16, 32, 4, 128


def region(
    name: str,
    own: Dim | None = None,
    params: tuple[ParamInfo, ...] = (),
    blocked: dict[Role, str] | None = None,
    batch: int = BATCH,
) -> Region:
    """A region with batch, sequence and hidden at its boundary; `blocked`: reasons by role."""
    reasons = blocked or {}
    crossing: tuple[tuple[Role, int], ...] = (
        ("batch", batch),
        ("sequence", SEQUENCE),
        ("hidden", HIDDEN),
    )
    dims = tuple(Dim(role, size, role, False, reasons.get(role, "")) for role, size in crossing)
    return Region(name, "GPT2Block", dims + ((own,) if own else ()), params)


def param(name: str, *shape: int, trainable: bool = True) -> ParamInfo:
    """A float32 parameter."""
    return ParamInfo(name, shape, "float32", trainable)


STREAM = region("stream", params=(param("ln_1.weight", HIDDEN), param("ln_1.bias", HIDDEN)))
HEADS_REGION = region(
    "heads",
    Dim("heads", HEADS, "heads", internal=True),
    (param("attn.c_attn.weight", HIDDEN, 3 * HIDDEN), param("attn.c_proj.weight", HIDDEN, HIDDEN)),
    {"sequence": "attention looks at all of it"},
)
FFN_REGION = region(
    "ffn",
    Dim("ffn", FFN, "ffn", internal=True),
    (param("mlp.c_fc.weight", HIDDEN, FFN), param("mlp.c_proj.weight", FFN, HIDDEN)),
)
BLOCK = (STREAM, HEADS_REGION, FFN_REGION)


def mesh(**axes: int) -> Mesh:
    """A mesh of these axes, outermost first."""
    return Mesh(tuple(axes.items()))


def refined(
    strategy: Strategy, where: Region, on: Mesh, start: Candidate | None = None
) -> list[Candidate | Refusal]:
    """What a strategy makes of a candidate, a bare one where none is given."""
    return list(strategy.refine(start or Candidate(where.name), where, on))


def refusal(strategy: Strategy, where: Region, on: Mesh, start: Candidate | None = None) -> str:
    """The reason of a strategy that has one refusal and nothing else."""
    (found,) = refined(strategy, where, on, start)
    assert isinstance(found, Refusal), found
    return found.reason

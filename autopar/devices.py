"""What a cluster is made of: devices, the links between them, and how a link was measured."""

from dataclasses import dataclass
from typing import Literal

Topology = Literal["switch", "mesh", "torus"]


@dataclass(frozen=True)
class Kernels:
    """How the kernels of a device, in one generation of software, fall short of its rates.

    Shares are of the device's `flops_per_s` for the dtype. A matrix product is cut into tiles, of
    which `units` (streaming multiprocessors) run at a time; `sustained` is what a full wave of the
    largest tiles reaches in training, `tile_128` and `tile_64` what smaller tiles reach of that
    (128 x 128, 128 x 64), `prologue` the length of K that a tile's start and end cost. Lengths that
    16 bytes divide but not 128 reach `aligned_16`, others `unaligned` (16-bit types). Fused
    attention reaches `attention` (`attention_backward` of it in the backward) of long sequences
    with wide heads, half of it at sequences of `attention_half`. The host runs ahead: device and
    host times h and d join to (d^q + h^q)^(1/q), q = `host_exponent`; a backward has
    `backward_ops` host ops for each forward op, an optimizer step `optimizer_ops` for each
    parameter (torch steps lists of parameters at once on GPUs). `joins_pointwise`: kernels do
    neighbouring pointwise ops together (a compiler's, or written by hand), `joins_sums`: adding up
    gradients too (a compiler's). `weight_products`: the
    dtype that operands of products with weights are cast to ("": none), for which `cast_bytes` move
    for each element of an input or of a result's gradient. A second of communication
    beside compute slows it by `overlap_slowdown` (1: nothing is hidden); every collective takes
    `collective_s` beside its algorithm, to start and to wait for the last rank.
    """

    units: int
    sustained: float
    tile_128: float
    tile_64: float
    prologue: float
    aligned_16: float
    unaligned: float
    attention: float
    attention_backward: float
    attention_half: float
    host_exponent: float
    backward_ops: float
    optimizer_ops: float
    joins_pointwise: bool = False
    joins_sums: bool = False
    weight_products: str = ""
    cast_bytes: float = 3.0
    overlap_slowdown: float = 1.0
    collective_s: float = 0.0


@dataclass(frozen=True)
class Device:
    """One device as a cost model sees it. `backend` is torch.distributed's ("gloo", "nccl").

    `flops_per_s` maps dtype names ("float32") to the rate that large matrix multiplications reach;
    `op_overhead_s` is the host's time per op; `overhead_bytes` is the part of `memory_bytes` that
    no plan can use (the device's context, the libraries' workspaces), `communicator_bytes` what
    each group of ranks that communicate takes beside, `fragmentation` by which share an allocator
    needs more for tensors that come and go than they have. `special_per_s`: how many exponentials,
    tangents and the like it takes a second (0: as many as its memory delivers). `kernels`: where
    left out, every op goes at the rates above, and the host waits for each.
    """

    name: str
    backend: str
    memory_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    op_overhead_s: float
    overhead_bytes: int = 0
    communicator_bytes: int = 0
    fragmentation: float = 0.0
    special_per_s: float = 0.0
    kernels: Kernels | None = None


@dataclass(frozen=True)
class Protocol:
    """One way in which a communication library moves bytes over a link; it takes the cheapest.

    A call costs `call_s`, a message of a ring or pair `latency_s` (of a tree `tree_latency_s`), and
    bytes go at `share` (`tree_share`) of the link's rate. NCCL's are LL, LL128 and Simple.
    """

    name: str
    call_s: float
    latency_s: float
    tree_latency_s: float
    share: float
    tree_share: float


@dataclass(frozen=True)
class Fit:
    """α and 1/β of one kind of collective over a link as measured, for messages of at most
    `up_to_bytes` (0: of any size). They are `algorithm`'s: "ring", say."""

    op: str
    algorithm: str
    up_to_bytes: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """One level of the network: `devices` neighbours reach each other over it, each with
    `latency_s` (α) a message and `bytes_per_s` (1/β) each way.

    `topology`: a "switch" carries any pairs at once, each device at `bytes_per_s`; in a full "mesh"
    every pair has a link of `bytes_per_s` of its own; in a "torus" every device has one to each
    neighbour along each dimension of `shape` (outermost first; ranks lie in row-major order), and
    dimensions of `wraps_from` devices or more close to a ring. `oversubscription`: how many times
    more bytes the devices can send than this level carries when all send at once (a fat tree's
    upper levels). `crowding`: groups that each have some of a node's devices, more than one,
    collide where they reach beyond `leaf` nodes, which one switch joins: each of g such groups has
    1 / (1 + crowding · g) of its rate. `switch_bytes_per_s`: the rate of
    all-reduces that the switch itself adds up, each of `switch_latency_s` (0: it can't).
    """

    name: str
    devices: int
    latency_s: float
    bytes_per_s: float
    topology: Topology = "switch"
    shape: tuple[int, ...] = ()
    wraps_from: int = 3
    oversubscription: float = 1.0
    crowding: float = 0.0
    leaf: int = 1
    switch_bytes_per_s: float = 0.0
    switch_latency_s: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    fits: tuple[Fit, ...] = ()


@dataclass(frozen=True)
class ClusterSpec:
    """`devices` equal devices; `links` from the innermost level to the outermost, whose `devices`
    is the whole cluster. `source` says where the numbers are from, `date` when."""

    device: Device
    devices: int
    links: tuple[Link, ...]
    source: str
    date: str

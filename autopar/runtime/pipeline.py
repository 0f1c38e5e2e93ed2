"""Runs a schedule's table on this rank: parts of a model on microbatches, tensors between stages.

Shapes are known beforehand, so that nothing but the tensors is sent. Sends and receives of one
tick go together and all stages have the ticks in one order (see `Table.steps`); a stage waits for
what it needs next, never for its sends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.process_mesh import Group
from autopar.runtime.split_backward import Later, backward_inputs
from autopar.schedule import Action, Message, Table

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Wire:
    """A tensor that one part hands to the next: its local shape for one microbatch, and whether a
    gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the model on this rank.

    `run(microbatch, received)` returns what the next part receives; the last part's returns the
    loss alone. `weights`: its trainable parameters. `begin_backward(last)` and `end_backward()`
    stand around each backward that makes weights' gradients; `last`: the part's last one.
    """

    run: Callable[[int, Tensors], Tensors]
    weights: Tensors = ()
    begin_backward: Callable[[bool], None] = lambda last: None
    end_backward: Callable[[], None] = lambda: None


@dataclass(frozen=True, eq=False)
class Pipeline:
    """`boundaries[p]`: what part p hands to part p + 1; the last part's: the loss. `group`: the
    stages, in order."""

    table: Table
    boundaries: tuple[tuple[Wire, ...], ...]
    group: Group

    def step(self, parts: Mapping[int, Part], device: torch.device) -> Tensor:
        """All microbatches forward and back; gradients are added to the weights'. Returns the sum
        of the losses of this rank's last part, 0 where that lies on another rank."""
        return self._run(self.table, parts, device)

    def forward(self, parts: Mapping[int, Part], device: torch.device) -> Tensor:
        """All microbatches forward, without gradients; returns as `step`."""
        with torch.no_grad():
            return self._run(self.table.forward_only(), parts, device)

    def _run(self, table: Table, parts: Mapping[int, Part], device: torch.device) -> Tensor:
        run = _Run(self, table, parts, device)
        for step in table.steps(self.group.rank):
            if isinstance(step, Action):
                run.act(step)
            else:
                run.exchange(step)
        for work, _ in run.sends:
            work.wait()
        assert not run.flights and not run.received, "the table leaves something undone"
        return run.loss


@dataclass
class _Flight:
    """A microbatch in a part, between its forward and its backward."""

    received: Tensors
    given: Tensors
    later: Later | None = None
    grads: Tensors = ()


@dataclass
class _Run:
    pipeline: Pipeline
    table: Table
    parts: Mapping[int, Part]
    device: torch.device
    loss: Tensor = field(init=False)
    sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    """Under way; the tensors live as long."""
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    received: dict[tuple[int, int, bool], tuple[Tensors, list[dist.Work]]] = field(
        default_factory=dict
    )
    """By part, microbatch and direction: under way, or there."""
    ready: dict[tuple[int, int, bool], Tensors] = field(default_factory=dict)
    """What is to be sent."""

    def __post_init__(self) -> None:
        (wire,) = self.pipeline.boundaries[-1]
        self.loss = torch.zeros(wire.shape, dtype=wire.dtype, device=self.device)
        order = self.table.orders[self.pipeline.group.rank]
        ends = {a.part: a for a in order if a.kind in ("B", "W")}
        self.last = frozenset(ends.values())
        """Each part's last action that makes weights' gradients."""

    # ------------------------------------------------------------ actions

    def act(self, action: Action) -> None:
        key = action.part, action.microbatch
        match action.kind:
            case "F":
                self._forward(*key)
            case "B":
                flight = self.flights.pop(key)
                grads = self._grads(*key, flight)
                self._weights_of(action, lambda: self._backward(flight, grads))
                inputs = _with_grad(flight.received)
                # A leaf's own gradient, and it is this stage's alone.
                back = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
                self._give_back(*key, tuple(back))
            case "I":
                flight = self.flights[key]
                grads = self._grads(*key, flight)
                inputs = _with_grad(flight.received)
                if inputs:
                    outputs = _with_grad(flight.given)
                    weights = self.parts[action.part].weights
                    found, flight.later = backward_inputs(outputs, grads, inputs, weights)
                    flight.given = ()
                    self._give_back(*key, found)
                else:
                    flight.grads = grads
            case "W":
                flight = self.flights.pop(key)
                self._weights_of(action, lambda: self._weights(flight))

    def _forward(self, part: int, microbatch: int) -> None:
        received: Tensors = ()
        if part > 0:
            received = self._take(part, microbatch, forward=True)
            for tensor, wire in zip(received, self._boundary(part - 1), strict=True):
                tensor.requires_grad_(wire.grad and torch.is_grad_enabled())
        given = self.parts[part].run(microbatch, received)
        if part + 1 == self.table.parts:
            (loss,) = given
            self.loss = self.loss + loss.detach()
        else:
            wires = self._boundary(part)
            assert len(given) == len(wires), (part, given, wires)
            # What is passed on unchanged becomes a tensor of its own, not a leaf.
            given = tuple(x.view_as(x) if any(x is y for y in received) else x for x in given)
            for tensor, wire in zip(given, wires, strict=True):
                assert tuple(tensor.shape) == wire.shape and tensor.dtype == wire.dtype, wire
                assert tensor.requires_grad == (wire.grad and torch.is_grad_enabled()), wire
            self.ready[part, microbatch, True] = tuple(x.detach().contiguous() for x in given)
        if torch.is_grad_enabled():
            self.flights[part, microbatch] = _Flight(received, given)

    def _grads(self, part: int, microbatch: int, flight: _Flight) -> Tensors:
        """Of the part's outputs: every backward starts from 1 at the loss."""
        if part + 1 < self.table.parts:
            return self._take(part, microbatch, forward=False)
        return tuple(torch.ones_like(loss) for loss in flight.given)

    def _weights_of(self, action: Action, make: Callable[[], None]) -> None:
        part = self.parts[action.part]
        part.begin_backward(action in self.last)
        make()
        part.end_backward()

    def _backward(self, flight: _Flight, grads: Tensors) -> None:
        outputs = _with_grad(flight.given)
        if outputs:
            torch.autograd.backward(outputs, grads)

    def _weights(self, flight: _Flight) -> None:
        if flight.later is None:
            self._backward(flight, flight.grads)
        else:
            flight.later.run()

    def _give_back(self, part: int, microbatch: int, grads: Tensors) -> None:
        if part > 0:
            self.ready[part, microbatch, False] = tuple(grad.contiguous() for grad in grads)

    # ------------------------------------------------------------ messages

    def _boundary(self, part: int) -> tuple[Wire, ...]:
        return self.pipeline.boundaries[part]

    def exchange(self, messages: tuple[Message, ...]) -> None:
        """Starts the sends and receives of one tick."""
        group, stages = self.pipeline.group, self.table.stages
        ops: list[tuple[dist.P2POp, list[dist.Work] | None]] = []
        for message in messages:
            key = message.target, message.microbatch, message.forward
            if message.source % stages == group.rank:
                peer = group.ranks[message.target % stages]
                for tensor in self.ready.pop((message.source, *key[1:])):
                    op = dist.P2POp(dist.isend, tensor, peer, group.process_group)
                    ops.append((op, None))
            else:
                peer = group.ranks[message.source % stages]
                works: list[dist.Work] = []
                tensors = self._empty(message)
                self.received[key] = tensors, works
                for tensor in tensors:
                    op = dist.P2POp(dist.irecv, tensor, peer, group.process_group)
                    ops.append((op, works))
        if not ops:
            return
        started = dist.batch_isend_irecv([op for op, _ in ops])
        # One work for each, or (NCCL) one for all.
        if len(started) == 1:
            started = started * len(ops)
        self.sends = [sent for sent in self.sends if not sent[0].is_completed()]
        for work, (op, receives) in zip(started, ops, strict=True):
            if receives is None:
                self.sends.append((work, op.tensor))
            else:
                receives.append(work)

    def _empty(self, message: Message) -> Tensors:
        wires = self._boundary(min(message.source, message.target))
        return tuple(
            torch.empty(wire.shape, dtype=wire.dtype, device=self.device)
            for wire in wires
            if message.forward or wire.grad
        )

    def _take(self, part: int, microbatch: int, *, forward: bool) -> Tensors:
        tensors, works = self.received.pop((part, microbatch, forward))
        for work in works:
            work.wait()
        return tensors


def _with_grad(tensors: Tensors) -> Tensors:
    return tuple(tensor for tensor in tensors if tensor.requires_grad)

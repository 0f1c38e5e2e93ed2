"""Random numbers of forward and backward, apart from the user's.

Ranks that share samples and layers draw from equal streams, so that a mask on a tensor that they
all hold is the same everywhere. What is split between them draws by `masks_apart`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopar.runtime.process_mesh import ProcessMesh


class RandomStream:
    """A seeded stream of torch's random numbers on the CPU and on `device`, whatever else the
    user's code draws on one of the ranks (rank 0 initialises the model, say)."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self.seed = seed
        """What the stream began from."""
        self._state = self._seeded(seed)

    @property
    def state(self) -> dict[str, Tensor]:
        """Where the stream stands, by device type: bytes, as torch's generators give them."""
        return dict(zip(("cpu", self._device.type), self._state, strict=False))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from a `state`. Errors: RuntimeError for bytes that are none."""
        wanted = tuple(state[device] for device in self.state)
        outer = self._get()
        try:
            self._set(wanted)
        finally:
            self._set(outer)
        self._state = wanted

    def reseed(self, seed: int) -> None:
        """Goes on as a stream of this seed; `self.seed` stays what the run began from."""
        self._state = self._seeded(seed)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside, torch draws from this stream; afterwards from where it was."""
        outer = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = self._get()
            self._set(outer)

    def _seeded(self, seed: int) -> tuple[Tensor, ...]:
        outer = self._get()
        torch.manual_seed(seed)
        state = self._get()
        self._set(outer)
        return state

    def _get(self) -> tuple[Tensor, ...]:
        return _get_state(self._device)

    def _set(self, state: tuple[Tensor, ...]) -> None:
        _set_state(self._device, state)


@contextmanager
def masks_apart(mesh: ProcessMesh, *axes: str, training: bool) -> Iterator[None]:
    """Inside, ranks along `axes` draw different random numbers, and all others the same: for
    dropout of a tensor that is split over these axes. A no-op where `training` is False.

    The numbers follow from one draw of the stream that the ranks share. That stream goes on
    equally on all of them, and running a layer again from its state (activation checkpointing)
    draws the same masks.
    """
    if not training:
        yield
        return
    place = 0
    for name, size in mesh.layout.axes:
        if name in axes:
            place = place * size + mesh.coordinate[name]
    with unset_fake_temporarily():  # also where a program is simulated
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    outer = _get_state(mesh.device)
    torch.manual_seed(drawn + place)
    try:
        yield
    finally:
        _set_state(mesh.device, outer)


def _get_state(device: torch.device) -> tuple[Tensor, ...]:
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


def _set_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)

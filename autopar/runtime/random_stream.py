"""Random numbers of forward and backward, apart from the user's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStream:
    """A seeded stream of torch's random numbers on the CPU and on `device`.

    Ranks must draw the same numbers for a dropout mask that they share, whatever else the user's
    code draws on one of them (rank 0 initialises the model, say).
    """

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
        if self._device.type == "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(self._device)
        return (torch.get_rng_state(),)

    def _set(self, state: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state[1], self._device)

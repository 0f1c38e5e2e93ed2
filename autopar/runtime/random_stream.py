"""Random numbers of forward and backward, apart from the user's."""

from collections.abc import Iterator
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
        outer = self._get()
        torch.manual_seed(seed)
        self._state = self._get()
        self._set(outer)

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

    def _get(self) -> tuple[Tensor, ...]:
        if self._device.type == "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(self._device)
        return (torch.get_rng_state(),)

    def _set(self, state: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state[1], self._device)

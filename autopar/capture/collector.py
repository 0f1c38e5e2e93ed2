"""Python's cyclic garbage collector, which would walk a large model again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collections inside: tracing makes many objects that all stay, and each full collection
    walks them and the model (a third of the time for a model of 126 layers)."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()

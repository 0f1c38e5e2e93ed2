"""Python's cyclic garbage collector, which would walk a large model again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collections inside. Tracing makes many objects, most of which stay, so that a full
    collection is due early; it walks all that Python has loaded, 0.2 s with torch and transformers,
    and frees little. The next allocation after this may start the one that was put off."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()

"""A line on the terminal that says how far the planner is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from autopar.planning.watch import Progress, Watch, unwatched
from autopar.text import seconds


@contextmanager
def shown(progress: bool, console: Console | None = None) -> Iterator[Watch]:
    """What a search reports, as one line on stderr that is gone at the end; nothing where
    `progress` is False or stderr is no terminal."""
    console = console or Console(stderr=True)
    if not progress or not console.is_terminal:
        yield unwatched
        return
    start = time.perf_counter()
    with console.status("autopar: planning") as status:
        yield lambda now: status.update(text(now, time.perf_counter() - start))


def text(now: Progress, spent_s: float) -> str:
    """Progress for reading: "autopar: 12 s, 96 settings seen, …"."""
    words = [f"autopar: {spent_s:.0f} s", f"{now.seen} settings seen", f"{now.dropped} impossible"]
    if now.solved:
        words += [f"{now.pruned} pruned", f"{now.solved} solved"]
    if now.best_s is not None:
        words.append(f"best {seconds(now.best_s)}")
    if now.bound_s is not None:
        words.append(f"none open below {seconds(now.bound_s)}")
    return ", ".join(words)

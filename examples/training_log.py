"""A progress bar with step, loss, tokens per second and time left, and a line every so often."""

import statistics
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 50
"""Steps between the lines that stay; a log file without a terminal has these alone."""


class TrainingLog:
    """Shown while the `with` lasts. A console that is quiet shows nothing, on ranks above 0 say."""

    def __init__(self, steps: int, tokens_per_step: int, console: Console) -> None:
        self._console = console
        self._tokens_per_step = tokens_per_step
        self._first_end = self._last_end = time.monotonic()
        self._seconds: list[float] = []
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=steps, loss=float("nan"), rate=0.0)

    def __enter__(self) -> "TrainingLog":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @property
    def tokens_per_s(self) -> float:
        """Mean rate since the end of the first step, which also sets things up; 0 until then."""
        elapsed_s = self._last_end - self._first_end
        return (len(self._seconds) - 1) * self._tokens_per_step / elapsed_s if elapsed_s else 0.0

    @property
    def step_s(self) -> float:
        """The median of the steps' seconds."""
        return statistics.median(self._seconds)

    def step(self, step: int, loss: float, seconds: float) -> None:
        """One step, counted from 0, has ended with this loss and took so long."""
        self._last_end = time.monotonic()
        if step == 0:
            self._first_end = self._last_end
        self._seconds.append(seconds)
        self._progress.update(self._task, advance=1, loss=loss, rate=self.tokens_per_s)
        if (step + 1) % LINE_EVERY == 0:
            self.say(f"step {step + 1:4}  loss {loss:.3f}  {self.tokens_per_s:,.0f} tokens/s")

    def say(self, line: str) -> None:
        """A line above the bar that stays."""
        self._console.print(line, highlight=False, soft_wrap=True)

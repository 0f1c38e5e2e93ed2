"""A strategy plugin for autopar."""

from autopar_wide_batch.strategy import WideBatch

__all__ = ["WideBatch"]

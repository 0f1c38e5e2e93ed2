"""Checkpoints: saved under one plan, loaded under any other."""

from autopar.runtime.checkpoint.load import Opened, open_checkpoint
from autopar.runtime.checkpoint.save import save_checkpoint
from autopar.runtime.checkpoint.state import Running

__all__ = ["Opened", "Running", "open_checkpoint", "save_checkpoint"]

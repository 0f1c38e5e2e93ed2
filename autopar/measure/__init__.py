"""Measuring a cluster, under torchrun: `measure` finds the figures, `spec_of` makes them a spec."""

from autopar.measure.command import machine_name, measure_here
from autopar.measure.run import Figures, Settings, measure
from autopar.measure.spec import Origin, spec_of, write_spec

__all__ = [
    "Figures",
    "Origin",
    "Settings",
    "machine_name",
    "measure",
    "measure_here",
    "spec_of",
    "write_spec",
]

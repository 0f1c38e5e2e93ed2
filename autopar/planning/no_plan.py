"""Why a search has no plan: nothing is legal, or nothing fits and by how much it doesn't."""

import math
from collections.abc import Sequence

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, InfeasibleError, OutOfTimeError
from autopar.layouts.layout import Setting
from autopar.planning.outer import Dropped
from autopar.planning.pins import Pins
from autopar.planning.shortage import smallest_short
from autopar.planning.tried import SearchOptions, Tried
from autopar.text import size


def nothing_legal(cluster: ClusterSpec, pins: Pins, dropped: Sequence[Dropped]) -> AutoparError:
    """Where every setting was dropped: each reason."""
    if not dropped:
        pinned = ", ".join(f"{axis} = {size}" for axis, size in pins.axes.items())
        return AutoparError(
            f"no mesh fills {cluster.devices} devices with {pinned or 'no axis to split over'}: "
            "the product of the axes must be the number of devices"
        )
    reasons = list(dict.fromkeys(f"{d.setting.mesh}: {d.reason}" for d in dropped))
    if len(reasons) == 1:
        return AutoparError(dropped[0].reason)
    listed = "\n  ".join(reasons[:12])
    return AutoparError(f"no mesh of {cluster.devices} devices is legal:\n  {listed}")


def nothing_fits(tried: Sequence[Tried], options: SearchOptions) -> AutoparError:
    """The smallest program of all settings: those that may need least are looked at first."""
    unknown = sum(one.result is None and math.isfinite(one.bound_s) for one in tried)
    if unknown:
        return OutOfTimeError(
            f"{options.time_limit_s} s were too short: whether anything fits is open on {unknown} "
            f"of {len(tried)} settings. Raise time_limit_s"
        )
    found = smallest_short(tried, options)
    if isinstance(found, OutOfTimeError):
        return found
    if found is None:
        return AutoparError("no choice of layouts is possible on any mesh")
    least, one = found
    setting = one.outer.asked
    return InfeasibleError(too_small(options.limit_bytes, least, setting), least, setting)


def too_small(limit_bytes: int, short_bytes: int, setting: Setting) -> str:
    """That nothing fits, and by how much the smallest plan doesn't."""
    need = limit_bytes + short_bytes
    return (
        f"nothing fits into {limit_bytes:,} bytes ({size(limit_bytes)}) a device: the smallest "
        f"plan, on {setting.mesh} with {setting.microbatches} microbatches, needs {need:,} bytes "
        f"({size(need)}), short by {short_bytes:,} ({size(short_bytes)}). Give more memory or more "
        "devices, a smaller batch, or lift a pin"
    )

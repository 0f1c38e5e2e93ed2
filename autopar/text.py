"""Quantities and names for reading."""

from collections.abc import Mapping

Option = bool | int | float | str | None


def mesh_text(axes: Mapping[str, int]) -> str:
    """A mesh, outermost axis first: "dp 2 · tp 2"."""
    return " · ".join(f"{axis} {length}" for axis, length in axes.items())


def short_mesh(axes: Mapping[str, int]) -> str:
    """A mesh without its axes of size 1; "one device" where there is no other."""
    return mesh_text({axis: length for axis, length in axes.items() if length > 1}) or "one device"


def strategy_text(name: str, options: Mapping[str, Option]) -> str:
    """A strategy with its options: "zero 3 within 2"."""
    first, *rest = options.items() or [("", "")]
    words = [name, str(first[1]), *(f"{key} {value}" for key, value in rest)]
    return " ".join(word for word in words if word)


def layer_span(layers: tuple[str, ...]) -> str:
    """Layers: "h.0 … h.3 (4)"; "" is the skeleton."""
    if layers == ("",):
        return "skeleton"
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)})"


def size(count: float) -> str:
    """Bytes: "12.3 MB" (decimal)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    """Seconds: "1.25 s", "12.30 ms"."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"

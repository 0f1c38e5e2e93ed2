"""A cluster with round numbers of its own, for tests whose result must not change with a preset."""

from typing import Any


def cluster(devices: int = 4, memory_bytes: int = 8 * 10**9) -> dict[str, Any]:
    """A cluster_spec: equal CPU devices on one network."""
    return {
        "device": {
            "name": "round",
            "backend": "gloo",
            "memory_bytes": memory_bytes,
            "flops_per_s": {"float32": 1e11, "float64": 5e10},
            "memory_bytes_per_s": 2e10,
            "op_overhead_s": 5e-6,
        },
        "devices": devices,
        "links": [{"name": "network", "devices": "all", "latency_s": 1e-5, "bytes_per_s": 1e9}],
        "source": "made up",
        "date": "",
    }

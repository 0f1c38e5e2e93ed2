"""Clusters: every way to give one, what is refused, and the presets as data."""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import ClusterSpec, Device, Fit, Link, describe_cluster, resolve_cluster
from autopar.errors import AutoparError
from autopar.preset_files import preset_info, preset_names, read_preset

FULL: dict[str, Any] = {
    "device": {
        "name": "chip",
        "backend": "gloo",
        "memory_bytes": 1000,
        "flops_per_s": {"float32": 1e9},
        "memory_bytes_per_s": 1e8,
        "op_overhead_s": 1e-6,
    },
    "devices": 8,
    "links": [
        {"name": "board", "devices": 4, "latency_s": 1e-6, "bytes_per_s": 1e9},
        {"name": "wire", "devices": "all", "latency_s": 1e-5, "bytes_per_s": 1e8},
    ],
}


def changed(**device: Any) -> dict[str, Any]:
    """FULL with fields of its device replaced."""
    return {**FULL, "device": {**FULL["device"], **device}}


def test_preset_string() -> None:
    spec = resolve_cluster("h100:64")
    assert spec.devices == 64
    assert spec.device.backend == "nccl"
    assert dict(spec.device.flops_per_s)["bfloat16"] == 794.5e12
    assert [(link.name, link.devices) for link in spec.links] == [("nvlink", 8), ("network", 64)]
    assert spec.source == "preset h100"
    assert spec.date == "2026-11-30"


def test_levels_beyond_the_cluster_are_cut() -> None:
    assert [(link.name, link.devices) for link in resolve_cluster("a100:4").links] == [
        ("nvlink", 4)
    ]
    assert [(link.name, link.devices) for link in resolve_cluster("a100:8").links] == [
        ("nvlink", 8)
    ]


def test_preset_with_overrides() -> None:
    plain = resolve_cluster("cpu:4")
    spec = resolve_cluster(
        {"preset": "cpu:4", "memory_bytes": 123, "flops_per_s": {"float32": 7.0}}
    )
    assert spec.device.memory_bytes == 123
    assert dict(spec.device.flops_per_s) == {**dict(plain.device.flops_per_s), "float32": 7.0}
    assert spec.device.op_overhead_s == plain.device.op_overhead_s
    assert spec.links == plain.links
    assert spec.source == "preset cpu, with the user's memory_bytes, flops_per_s"


def test_preset_with_devices_apart_and_own_links() -> None:
    links = [{"name": "wire", "devices": "all", "latency_s": 1e-3, "bytes_per_s": 1e6}]
    spec = resolve_cluster({"preset": "cpu", "devices": 2, "links": links})
    assert spec.devices == 2
    assert spec.links == (Link("wire", 2, 1e-3, 1e6),)


def test_full_mapping_and_spec_itself() -> None:
    spec = resolve_cluster({**FULL, "source": "a data sheet", "date": "2026-01-02"})
    assert spec == ClusterSpec(
        Device("chip", "gloo", 1000, (("float32", 1e9),), 1e8, 1e-6),
        8,
        (Link("board", 4, 1e-6, 1e9), Link("wire", 8, 1e-5, 1e8)),
        "a data sheet",
        "2026-01-02",
    )
    assert resolve_cluster(spec) is spec


@pytest.mark.parametrize("name", ["cluster.json", "cluster.yaml", "cluster.yml"])
def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(FULL), encoding="utf-8")  # JSON is YAML too
    assert resolve_cluster(path) == resolve_cluster(str(path)) == resolve_cluster(FULL)


def test_yaml_in_its_own_notation(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("preset: cpu\ndevices: 2\nmemory_bytes: 8e9\n", encoding="utf-8")
    assert resolve_cluster(path).device.memory_bytes == 8_000_000_000


def test_numbers_may_carry_their_source() -> None:
    sourced = {"value": 1000, "source": "weighed", "date": "2026-01-02"}
    assert resolve_cluster(changed(memory_bytes=sourced)) == resolve_cluster(FULL)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "b300:8",
            "unknown preset 'b300': known are a100, a100_40gb, b200, cpu, full_mesh, gb200_nvl",
        ),
        ("cpu", "preset 'cpu' needs a number of devices: 'cpu:4', say"),
        ("cpu:", "'cpu:': '' is no number of devices"),
        ("cpu:four", "'cpu:four': 'four' is no number of devices"),
        ("cpu:-4", "'cpu:-4': '-4' is no number of devices"),
        ("cpu:0", "devices must be a positive integer, not 0"),
        ("h100:12", "link network joins 12 devices, which is no multiple of the 8"),
        ({"preset": "cpu:4", "devices": 4}, "devices is given twice: 'cpu:4' and 4"),
        ({"preset": "cpu:4", "memory": 5}, "cluster_spec has no 'memory': allowed are preset, dev"),
        ({"preset": "cpu:4", "memory_bytes": -5}, "memory_bytes must be a positive integer, not -"),
        (
            {"preset": "cpu:4", "memory_bytes": 1.5},
            "memory_bytes must be a positive integer, not 1",
        ),
        ({"preset": "cpu:4", "memory_bytes": "8e9"}, "must be a positive integer, not '8e9'"),
        ({"preset": "cpu:4", "op_overhead_s": 0}, "op_overhead_s must be a positive number, not 0"),
        ({"preset": "cpu:4", "links": []}, "the outermost link joins 1 of 4 devices"),
        ({"preset": "cpu:4", "links": "wire"}, "links must be a list"),
        ({}, "cluster_spec lacks 'device'"),
        ({k: v for k, v in FULL.items() if k != "devices"}, "cluster_spec lacks 'devices'"),
        ({**FULL, "devices": True}, "devices must be a positive integer, not True"),
        ({**FULL, "link": []}, "cluster_spec has no 'link': allowed are device, devices, links"),
        ({**FULL, "device": 3}, "device must be a mapping, not 3"),
        ({**FULL, "devices": 6}, "link wire joins 6 devices, which is no multiple of the 4"),
        ({**FULL, "links": FULL["links"][:1]}, "the outermost link joins 4 of 8 devices"),
        ({**FULL, "links": [{"name": "wire"}]}, "links lacks 'devices'"),
        ({**FULL, "links": [{"speed": 3}]}, "links has no 'speed': allowed are name, devices"),
        (changed(flops_per_s={}), "flops_per_s is empty"),
        (changed(flops_per_s=1e9), "flops_per_s must map dtype names to rates, not 1000000000.0"),
        (changed(flops_per_s={"float32": float("nan")}), r"flops_per_s\[float32\] must be a pos"),
        (changed(memory_bytes_per_s=float("inf")), "memory_bytes_per_s must be a positive number"),
        (changed(overhead_bytes=-1), "overhead_bytes must be a positive integer, not -1"),
        (changed(bandwidth=1), "device has no 'bandwidth': allowed are name, backend"),
        (4, "cluster_spec is int: pass a ClusterSpec"),
        ("nowhere.yaml", "can't read nowhere.yaml: No such file"),
    ],
)
def test_refused(spec: Any, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        resolve_cluster(spec)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json isn't valid"),
        ("a.yaml", "a: [", "a.yaml isn't valid"),
        ("a.yaml", "- 1", "a.yaml holds list, not a mapping"),
    ],
)
def test_refused_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(AutoparError, match=message):
        resolve_cluster(tmp_path / name)


def test_the_manual_s_example(tmp_path: Path) -> None:
    manual = Path(__file__).parent.parent / "docs" / "clusters.md"
    (example,) = re.findall(r"```yaml\n(.*?)```", manual.read_text("utf-8"), re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(example, encoding="utf-8")
    spec = resolve_cluster(path)
    assert [link.devices for link in spec.links] == [8, 64, 256]
    assert spec.links[-1].oversubscription == 2


# ---------------------------------------------------------------- topologies


def linked(**fields: Any) -> dict[str, Any]:
    """FULL with 8 devices on one link with these fields."""
    link = {"name": "wire", "devices": "all", "latency_s": 1e-6, "bytes_per_s": 1e9, **fields}
    return {**FULL, "links": [link]}


def test_a_torus_is_as_even_as_its_devices_allow() -> None:
    assert resolve_cluster("tpu_v5p:8960").links[0].shape == (16, 20, 28)
    assert resolve_cluster("tpu_v5p:64").links[0].shape == (4, 4, 4)
    assert resolve_cluster("tpu_v5p:32").links[0].shape == (2, 4, 4)
    assert resolve_cluster("tpu_v5p:17920").links[-1] == Link("network", 17920, 1e-5, 6.25e9)
    (link,) = resolve_cluster(linked(topology="torus", shape=[2, 4])).links
    assert (link.topology, link.shape, link.wraps_from) == ("torus", (2, 4), 3)


def test_what_a_link_was_measured_at() -> None:
    fit = {"op": "all_reduce", "algorithm": "ring", "up_to_bytes": 1e6, "latency_s": 1e-6,
           "bytes_per_s": 1e9}  # fmt: skip
    (link,) = resolve_cluster(linked(fits=[fit])).links
    assert link.fits == (Fit("all_reduce", "ring", 10**6, 1e-6, 1e9),)
    assert resolve_cluster(describe_cluster(resolve_cluster(linked(fits=[fit])))).links == (link,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topology": "star"}, "link wire: topology is 'star'; known are switch, mesh, torus"),
        ({"topology": "torus"}, r"link wire: a torus of shape \[\] doesn't hold 8"),
        ({"topology": "torus", "shape": [3, 3]}, r"shape \[3, 3\] doesn't hold 8"),
        ({"topology": "torus", "shape": [-2, -4]}, "shape must be a positive integer, not -2"),
        ({"topology": "torus", "shape": 8}, "shape must be a list of lengths, not 8"),
        ({"topology": "torus", "shape": [8], "dimensions": 1}, "has both a shape and dimensions"),
        ({"topology": "torus", "dimensions": 0}, "dimensions must be a positive integer, not 0"),
        ({"shape": [8]}, "link wire has a shape, but its topology is 'switch'"),
        ({"oversubscription": 0.5}, "oversubscription 0.5 must be 1 or more"),
        ({"crowding": -1}, "crowding must be a positive number, not -1"),
        ({"wraps_from": 0}, "wraps_from must be a positive integer, not 0"),
        ({"switch_bytes_per_s": 1e9}, "switch_latency_s must be a positive number, not 0"),
        ({"protocols": {}}, "protocols must be a list"),
        ({"protocols": [{"name": "LL"}]}, "link wire: protocols lacks 'call_s'"),
        ({"fits": [{"speed": 1}]}, "link wire: fits has no 'speed': allowed are op, algorithm"),
    ],
)
def test_refused_links(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        resolve_cluster(linked(**fields))


# ---------------------------------------------------------------- the presets


def numbers(data: Any, where: str = "") -> list[tuple[str, Any]]:
    """Every leaf of a preset that must be a sourced number, with its place."""
    if isinstance(data, dict) and "value" not in data:
        return [found for key, value in data.items() for found in numbers(value, f"{where}.{key}")]
    if isinstance(data, list):
        return [found for i, value in enumerate(data) for found in numbers(value, f"{where}[{i}]")]
    words = (".name", ".summary", ".date", ".backend", ".devices", ".topology", ".dimensions")
    named = where.endswith((*words, ".pattern", ".node", ".op", ".algorithm"))
    return [] if named else [(where, data)]


def test_presets_are_listed() -> None:
    assert preset_names() == (
        "a100",
        "a100_40gb",
        "b200",
        "cpu",
        "full_mesh",
        "gb200_nvl72",
        "h100",
        "h200",
        "h800",
        "mi300x",
        "tpu_v5p",
        "v100",
    )


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_well_formed(name: str) -> None:
    text = (resources.files("autopar") / "presets" / f"{name}.json").read_text("utf-8")
    preset = json.loads(text)
    assert preset["name"] == name
    found = numbers(preset)
    assert len(found) >= 8
    for where, number in found:
        assert set(number) == {"value", "source", "date", "verified"}, where
        assert len(number["source"]) > 10, where
        assert number["date"] <= preset["date"], where
        assert isinstance(number["verified"], bool), where
    spec = resolve_cluster(f"{name}:16")
    assert {"float32", "bfloat16"} <= dict(spec.device.flops_per_s).keys()
    assert 0 <= spec.device.overhead_bytes < spec.device.memory_bytes
    assert spec.links[-1].devices == 16


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_is_listed_with_its_source(name: str) -> None:
    info = preset_info(name)
    listed = "\n".join(info.sources)
    assert info.summary and info.date == read_preset(name)["date"]
    assert "device.memory_bytes: " in listed
    assert ".latency_s, " in listed or ".latency_s: " in listed
    assert ("[not verified]" in listed) is (name != "cpu")


@pytest.mark.parametrize("spec", [f"{name}:16" for name in preset_names()])
def test_a_described_cluster_is_the_same_again(spec: str) -> None:
    cluster = resolve_cluster(spec)
    described = json.loads(json.dumps(describe_cluster(cluster)))
    assert resolve_cluster(described) == cluster


@pytest.mark.parametrize("key", ["name", "backend"])
def test_names_are_text(key: str) -> None:
    described = describe_cluster(resolve_cluster("cpu:4"))
    described["device"][key] = ["gloo"]
    with pytest.raises(AutoparError, match=rf"device.{key} must be text, not \['gloo'\]"):
        resolve_cluster(described)


@pytest.mark.parametrize("value", [[], ["mine"], {}, None, 1])
def test_a_source_is_text(value: object) -> None:
    described = describe_cluster(resolve_cluster("cpu:4")) | {"source": value}
    with pytest.raises(AutoparError, match="source must be text"):
        resolve_cluster(described)

"""Measuring and detecting clusters: the fits, the spec that comes out, and who may ask."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from pool import Pool

from autopar.cli import main
from autopar.cluster import ClusterSpec, describe_cluster, resolve_cluster
from autopar.cost_models.collectives import CollectiveCost
from autopar.detect import cpu_machine, gpu_machine
from autopar.errors import AutoparError
from autopar.measure import Figures, Origin, Settings, measure, spec_of, write_spec
from autopar.measure.fit import ALGORITHMS, SMALL_BYTES, Sample, fit, fits, terms
from autopar.plugin import Collective, Mesh

SIZES = (1024, 16384, 2**20, 2**24)
ORIGIN = Origin("a test", "2026-01-02")


def samples(
    backend: str, small: tuple[float, float], large: tuple[float, float], ranks: tuple[int, ...]
) -> tuple[Sample, ...]:
    """What an α-β machine would show, after a product of 1 ms: other figures for small messages."""
    found = []
    for name, op in ALGORITHMS:
        for n in ranks:
            for size in SIZES if name == backend else ():
                steps, sent = terms(backend, op, size, n)
                alpha, beta = small if size <= SMALL_BYTES else large
                added = alpha * steps + beta * sent
                found.append(Sample(op, size, n, added, 1e-3 + added))
    return tuple(found)


def figures(world: int = 4, local: int = 4, backend: str = "gloo") -> Figures:
    inside = samples(backend, (2e-5, 1e-9), (3e-5, 2e-9), (2, 4))
    across = samples(backend, (2e-4, 1e-8), (3e-4, 2e-8), (world // local,))
    levels = ((inside,) if local > 1 else ()) + ((across,) if world > local else ())
    rates = {"float32": 5e10, "float64": 2.5e10}
    return Figures(
        backend, "cpu", world, local, 10**9, 0, rates, 2e10, 4e8, 5e-6, 2e-6, 1e-3, levels
    )  # fmt: skip


# ---------------------------------------------------------------- fits


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_fits_find_what_was_put_in(backend: str) -> None:
    found = fits(backend, samples(backend, (2e-5, 1e-9), (3e-5, 2e-9), (2, 4)))
    assert len(found) == 10
    for _, up_to, one in found:
        alpha, beta = (2e-5, 1e-9) if up_to == SMALL_BYTES else (3e-5, 2e-9)
        assert one.alpha_s == pytest.approx(alpha)
        assert one.beta_s == pytest.approx(beta)
        assert one.error < 1e-9


def test_a_fit_is_positive_where_one_unknown_cannot_be_seen() -> None:
    """Small messages that get cheaper with size, by noise: all is α."""
    noisy = [Sample("all_gather", b, 4, t, 1e-3 + t) for b, t in ((64, 3.1e-4), (4096, 2.9e-4))]
    one = fit("gloo", noisy)
    assert one.alpha_s == pytest.approx(1e-4, rel=0.1)
    assert 0 < one.beta_s < 1e-6
    nothing = fit("gloo", [replace(sample, added_s=0.0) for sample in noisy])
    assert nothing.alpha_s > 0 and nothing.beta_s > 0


# ---------------------------------------------------------------- specs


@pytest.mark.parametrize("name", ["c.json", "c.yaml"])
def test_a_spec_is_read_back_and_priced_by(tmp_path: Path, name: str) -> None:
    write_spec(spec_of(figures(), ORIGIN), tmp_path / name)
    spec = resolve_cluster(tmp_path / name)
    assert (spec.devices, spec.source, spec.date) == (4, "a test", "2026-01-02")
    assert (spec.device.backend, spec.device.op_overhead_s) == ("gloo", 5e-6)
    assert spec.device.special_per_s == 4e8
    assert resolve_cluster(describe_cluster(spec)) == spec
    for sample in figures().levels[0]:
        mesh = Mesh((("dp", 4 // sample.ranks), ("tp", sample.ranks)))
        effect = Collective(sample.op, sample.nbytes, (mesh.part("tp"),), "forward", "step", "x")  # type: ignore[arg-type]
        price = CollectiveCost().cost(effect, mesh, spec)
        assert price == pytest.approx(sample.added_s, rel=0.01), sample


def test_a_spec_of_several_nodes() -> None:
    spec = resolve_cluster(spec_of(figures(world=16, local=4), ORIGIN))
    assert [(link.name, link.devices) for link in spec.links] == [("inside", 4), ("across", 16)]
    assert spec.links[0].latency_s < spec.links[1].latency_s / 5
    mesh = Mesh((("dp", 16),))
    effect = Collective("all_gather", 2**20, (mesh.part("dp"),), "forward", "step", "x")
    # A ring of 16 crosses each node's edge: 3 hops of 15 outside, in at 4 members' rates.
    latency, slower = 12 * 3e-5 + 3 * 3e-4, max(2e-9, 2e-8 / 4)
    expected = latency + 15 / 16 * 2**20 * slower
    assert CollectiveCost().cost(effect, mesh, spec) == pytest.approx(expected, rel=0.01)
    only = resolve_cluster(spec_of(figures(world=4, local=1), ORIGIN))
    assert [(link.name, link.devices) for link in only.links] == [("across", 4)]


def test_one_process_shows_no_link() -> None:
    with pytest.raises(AutoparError, match="one process shows no link: start two or more"):
        spec_of(figures(world=1, local=1), ORIGIN)


def task() -> tuple[ClusterSpec, int]:
    """One rank's part of a short measurement; the threads that torch has afterwards."""
    before = torch.get_num_threads()
    found = measure(torch.device("cpu"), 4, Settings(1, (4096, 8192, 2**17, 2**18), calls=10))
    return resolve_cluster(spec_of(found, ORIGIN)), torch.get_num_threads() - before


def test_four_processes(pool4: Pool) -> None:
    """Every rank has the same figures, each of every kind."""
    answers = pool4.run(task)
    spec = answers[0][0]
    assert answers == [(spec, 0)] * 4
    assert {"float32", "float64", "bfloat16", "float16"} == dict(spec.device.flops_per_s).keys()
    assert [(link.name, link.devices) for link in spec.links] == [("loopback", 4)]
    assert len(spec.links[0].fits) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "c.json"], "needs two processes or more"),
        (["--out", "c.txt"], "c.txt: a cluster's file ends with .json, .yaml or .yml"),
        (["--out", "nowhere/c.json"], "there is no folder nowhere"),
        (["--out", "c.json", "--repeats", "0"], "--repeats must be 1 or more, not 0"),
    ],
)
def test_mistakes_of_measure(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["measure", *arguments]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- detection


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200_nvl72"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_by_name(name: str, preset: str) -> None:
    machine = gpu_machine(name, 77 * 10**9, world=4, local=4)
    spec = resolve_cluster(machine.spec)
    assert spec.device == replace(resolve_cluster(f"{preset}:4").device, memory_bytes=77 * 10**9)
    assert spec.devices == 4
    assert machine.source == f"detected 4 x {name}, 4 a node; rates of preset {preset}"


def test_small_nodes() -> None:
    """Four H100 a node are a level of four; four GB200 are part of a domain of 72."""
    small = resolve_cluster(gpu_machine("NVIDIA H100", 10**10, 16, 4).spec)
    assert [link.devices for link in small.links] == [4, 16]
    large = resolve_cluster(gpu_machine("NVIDIA GB200", 10**10, 16, 4).spec)
    assert [link.devices for link in large.links] == [16]


def test_an_unknown_gpu() -> None:
    with pytest.raises(AutoparError, match="no preset is for 'Radeon 9'"):
        gpu_machine("Radeon 9", 10**9, 1, 1)


def test_cpus_share_their_node_s_memory() -> None:
    spec = resolve_cluster(cpu_machine(16 * 10**9, world=8, local=4).spec)
    assert (spec.devices, spec.device.memory_bytes, spec.device.backend) == (8, 4 * 10**9, "gloo")


def test_detect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = resolve_cluster("auto")
    assert spec.source.startswith("detected ")
    assert main(["detect"]) == 0
    assert resolve_cluster(yaml.safe_load(capsys.readouterr().out)) == spec
    assert main(["detect", "--out", str(tmp_path / "c.json")]) == 0
    assert resolve_cluster(tmp_path / "c.json") == spec
    assert json.loads((tmp_path / "c.json").read_text("utf-8"))["devices"] == spec.devices

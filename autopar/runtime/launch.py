"""The process group, from what torchrun says. The one place that reads environment variables."""

import os

import torch
import torch.distributed as dist


def torchrun_sizes() -> tuple[int, int] | None:
    """(processes of the job, processes of this node) as torchrun says; None without it."""
    if not {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return None
    return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])


def initialise(device_type: str) -> None:
    """Joins torchrun's process group, if torchrun started this process and nobody has joined yet.

    Takes the device of torchrun's LOCAL_RANK. Without torchrun nothing happens: a program for one
    device needs no process group, and for more the mesh reports the wrong world.
    """
    if dist.is_initialized() or not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

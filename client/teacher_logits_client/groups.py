"""Process groups of torch.distributed, as our collectives take them: there, and with this rank in.

Promises that a collective over a group which is not there, or that this rank is no part of, is
refused before it: torch warns of the second and returns what it was given.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from teacher_logits.errors import ConfigError


def check_group(group: object, what: str) -> None:
    """Let a group pass that this rank is in; None is the world. ``what`` needs it, in words.

    Raises:
        ConfigError: torch.distributed has no process group, ``group`` is none, or this rank is
            not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{what}: torch.distributed has no process group yet; call "
            "torch.distributed.init_process_group first, or leave it out for one process"
        )
    # What new_group gives the ranks it leaves out is no ProcessGroup.
    left_out = group is dist.GroupMember.NON_GROUP_MEMBER
    if left_out or (isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0):
        raise ConfigError(
            f"{what}: rank {dist.get_rank()} of {dist.get_world_size()} is not in the group; only "
            "those that are in it call this",
            facts={"rank": dist.get_rank(), "ranks": dist.get_world_size()},
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"{what}: the group is a {type(group).__name__}; give one that "
            "torch.distributed.new_group or a device mesh returned, or None for the world",
            facts={"given": type(group).__name__},
        )


def usual_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where numbers of a CPU are reduced: this process's GPU where there is NCCL alone."""
    backend = str(dist.get_backend(group))
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

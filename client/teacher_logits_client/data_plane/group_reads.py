"""One rank of a replica reads a step's rows, and hands them to the others over their group.

    leader   ->  int64 [1]    size of the table
             ->  uint8        the table: each field's name, element type, shape and row lengths
             ->  uint8        each field's bytes, flat

The store is asked once a replica and not once a rank. Where the leader could not read, the others
are told in the table's place, and raise as it does: none is left waiting for bytes that do not
come. A rank that dies is the group's own matter, by its timeout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist

from teacher_logits.errors import TransportFailure
from teacher_logits_client.data_plane.jagged import flat_rows, lengths_of_rows, nest
from teacher_logits_client.groups import check_group, usual_device

if TYPE_CHECKING:
    from collections.abc import Callable


class _Entry(TypedDict):
    """One field of the table; ``lengths`` are its rows', where they differ."""

    name: str
    element_type: str
    shape: list[int]
    lengths: list[int] | None


@dataclass(frozen=True, kw_only=True)
class GroupReads:
    """A ``presharded.Replica``: the group's first rank reads and writes, the others have a copy.

    Args:
        group: the ranks that compute the same rows; None for all there are.

    Raises:
        ConfigError: there is no such group, or this rank is not in it.
    """

    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        check_group(self.group, "reading for a replica")

    @property
    def is_leader(self) -> bool:
        """Whether this is the group's first rank."""
        return dist.get_rank(self.group) == 0

    def share(self, read: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return what ``read`` gives at the leader, at each rank; on the CPU.

        Raises:
            TransportFailure: the leader could not read, with its words; at the leader itself,
                whatever it was.
        """
        if not self.is_leader:
            return self._receive()
        try:
            fields = read()
        except BaseException as error:
            self._send_table({"error": f"{type(error).__name__}: {error}"})
            raise
        flat = {name: _flat(value) for name, value in fields.items()}
        table = [_entry(name, value, flat[name]) for name, value in fields.items()]
        self._send_table(table)
        for value in flat.values():
            self._broadcast(value.reshape(-1).view(torch.uint8))
        return fields

    def _receive(self) -> dict[str, torch.Tensor]:
        size = int(self._broadcast(torch.zeros(1, dtype=torch.int64)))
        said = self._broadcast(torch.zeros(size, dtype=torch.uint8))
        table: list[_Entry] | dict[str, str] = json.loads(bytes(said.tolist()))
        if isinstance(table, dict):
            raise TransportFailure(
                f"the leader of this replica could not read the rows ({table['error']}): nothing "
                "was handed on",
                facts={"error": table["error"]},
            )
        return {entry["name"]: self._receive_field(entry) for entry in table}

    def _receive_field(self, entry: _Entry) -> torch.Tensor:
        element_type: torch.dtype = getattr(torch, entry["element_type"])
        flat = torch.zeros(entry["shape"], dtype=element_type)
        as_bytes = self._broadcast(flat.reshape(-1).view(torch.uint8))
        flat = as_bytes.view(element_type).reshape(entry["shape"])
        lengths = entry["lengths"]
        return flat if lengths is None else nest(flat, torch.tensor(lengths, dtype=torch.int64))

    def _send_table(self, table: object) -> None:
        said = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(said)]))
        self._broadcast(said)

    def _broadcast(self, value: torch.Tensor) -> torch.Tensor:
        """Return the leader's bytes, on the CPU; nothing is sent of nothing."""
        if value.numel():
            there = value.to(usual_device(self.group))
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast(there, src=source, group=self.group)
            value = there.cpu()
        return value


def _flat(value: torch.Tensor) -> torch.Tensor:
    rows = flat_rows(value) if value.is_nested else value
    return rows.detach().cpu().contiguous()


def _entry(name: str, value: torch.Tensor, flat: torch.Tensor) -> _Entry:
    return {
        "name": name,
        "element_type": str(flat.dtype).removeprefix("torch."),
        "shape": list(flat.shape),
        "lengths": lengths_of_rows(value).tolist() if value.is_nested else None,
    }

"""A released schema beside the newest one: its messages in a pool of their own, and its RPCs.

`releases/` has the schema of each release, as `make proto-release` kept it. They are
descriptors and not generated code, which would clash with the newest stubs by name; a class is made
of each message as it is asked for, and behaves as that release's stubs do.
"""

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

RELEASES = Path(__file__).parent / "releases"
PACKAGE = "teacher_logits.v1"


class Schema:
    """The schema of one release.

    `methods` is each RPC's descriptor by its path.
    """

    def __init__(self, release: str) -> None:
        self.release = release
        self._pool = DescriptorPool()
        files = FileDescriptorSet.FromString((RELEASES / f"{release}.binpb").read_bytes())
        for each in files.file:
            self._pool.Add(each)
        self.files = [self._pool.FindFileByName(each.name) for each in files.file]
        self.methods = {
            f"/{service.full_name}/{method.name}": method
            for file in self.files
            for service in file.services_by_name.values()
            for method in service.methods
        }

    def message(self, name: str) -> Any:
        """The class of a message of the schema."""
        return GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    def value(self, enum: str, name: str) -> int:
        """The number of an enum's value."""
        number: int = self._pool.FindEnumTypeByName(f"{PACKAGE}.{enum}").values_by_name[name].number
        return number

    def known_of(self, descriptor: Any, data: bytes) -> bytes:
        """What this release understands of a message: what it does not know is dropped."""
        message = GetMessageClass(descriptor).FromString(data)
        message.DiscardUnknownFields()
        known: bytes = message.SerializeToString()
        return known


FIRST = Schema("0.1.0")

"""The stage of the server's own engine: head and top-k on the device, and whoever reads that."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import torch
from tests.gpu.engine_student import TOP_K
from tests.gpu.rig import MIB, Failed, Numbers, Peer, Rig
from tests.gpu.service_rig import serving_engine
from tests.gpu.tiny_teacher import TinyTeacher, rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping

STUDENT = "tests.gpu.engine_student"
TEACHER = "tests.gpu.tiny_teacher:make"
READERS = {
    "device": ("cuda_ipc", "cow"),
    "host": ("shared_memory", "cow"),
    "pinned": ("shared_memory", "pinned"),
}
"""Students by what they read: each its transport, and how it maps host memory."""
ROWS = 8
SAMPLE = 16
TOLERANCE = 0.02
"""Of a log-probability in fp16, from a product that another process may have cut otherwise."""


def engine(rig: Rig) -> Numbers:
    """The engine scores straight into the slab, and a student trains where that lies.

    Two students have the same bits from host memory, one of them by pages that are pinned where
    they lie. Each score has a long kernel before its head: a wait that is left out shows.
    """
    tokens = 64 if rig.is_fake else 4096
    pool = 4 * (ROWS * tokens * (6 * TOP_K + 12) + MIB)
    sizes = (f"--device-pool-size={pool}", f"--slab-size={pool // 2}", f"--pool-size={2 * pool}")
    numbers: Numbers = {"positions": ROWS * tokens}
    with ExitStack() as stack:
        server = stack.enter_context(serving_engine(rig, TEACHER, *sizes))
        students: dict[str, Peer] = {}
        for name, (transport, mode) in READERS.items():
            student = stack.enter_context(rig.peer(STUDENT, server.address))
            said = student.ask("open", transport=transport, mode=mode)
            if said["transport"] != transport:
                raise Failed(f"the session did not come to {transport}", **said)
            students[name] = student
        numbers["took_us"] = _score_in_turn(rig, students, tokens, numbers)
        for student in students.values():
            student.ask("leave")
        code = server.stop()
        if code:
            raise Failed(f"the server ended with {code}", **numbers)
    return numbers


def _score_in_turn(
    rig: Rig, students: Mapping[str, Peer], tokens: int, numbers: Numbers
) -> Numbers:
    """Have each student's rows scored some times; return the medians of what that took."""
    taken: dict[str, list[float]] = {name: [] for name in students}
    for turn in rig.clock.through(range(rig.rounds), what="turns"):
        digests: Numbers = {}
        for name, student in students.items():
            said = student.ask("score", rows=ROWS, tokens=tokens)
            taken[name].append(float(str(said["us"])))
            _check_place(rig, name, said)
            digests[name] = student.ask("digests")
            if turn == 0:
                numbers[name] = {**said, **student.ask("train")}
                _check_sample(rig, student, tokens)
            student.ask("close")
        if any(each != digests["device"] for each in digests.values()):
            raise Failed("students of one teacher have different bits", turn=turn, **digests)
    return {name: round(statistics.median(values), 1) for name, values in taken.items()}


def _check_place(rig: Rig, name: str, said: Numbers) -> None:
    """Refuse scores that did not come as the student reads, or lie elsewhere."""
    place = str(rig.torch_device) if name == "device" else "cpu"
    pinned = name == "pinned" and not rig.is_fake
    wanted = {"transport": READERS[name][0], "device": place}
    if any(said[key] != value for key, value in wanted.items()):
        raise Failed(f"the {name} student's scores did not come as they should", **said)
    if said["is_pinned"] is not pinned and name != "device":
        raise Failed(f"the {name} student's pages are pinned, or not, against its mode", **said)


def _check_sample(rig: Rig, student: Peer, tokens: int) -> None:
    """Hold some entries against the teacher's own, computed here."""
    said = student.ask("sample", positions=SAMPLE)
    ids = torch.tensor(cast("list[list[int]]", said["ids"]))
    logprobs = torch.tensor(cast("list[list[float]]", said["logprobs"]))
    row = torch.tensor(rows_of(ROWS, tokens)[0])
    right = TinyTeacher(rig.torch_device).of_row(row, SAMPLE).log_softmax(-1).cpu()
    best = right.topk(ids.shape[1]).values
    far = max(
        float((right.gather(1, ids) - logprobs).abs().max()), float((best - logprobs).abs().max())
    )
    if not far <= TOLERANCE:
        raise Failed("scores are not the teacher's", difference=far, tolerance=TOLERANCE)

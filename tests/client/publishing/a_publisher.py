"""What tests of publishers share: a teacher's profile, its logits, and what is read of them."""

import torch

import teacher_logits_client as tl

ROWS, WIDTH, VOCABULARY, K = 4, 12, 50, 6


def a_grid(ranks: int = 1, *, rows: int = ROWS, micro: int = 1) -> tl.BatchGrid:
    return tl.BatchGrid(global_batch_size=rows, data_parallel_size=ranks, micro_batch_size=micro)


def a_teacher(teacher_id: str, **given: object) -> tl.TeacherProfile:
    """A teacher of four rows on one rank."""
    values = {
        "vocabulary_size": VOCABULARY,
        "head_rows": VOCABULARY + 6,
        "top_k": K,
        "max_row_tokens": 64,
        "batch_grid": a_grid(),
        "temperatures": (2.0,),
        "value_type": tl.ElementType.FLOAT32,
        **given,
    }
    return tl.TeacherProfile(teacher_id=teacher_id, **values)  # type: ignore[arg-type]


def a_student(teacher_id: str, **given: object) -> tl.StudentProfile:
    """The student of that teacher."""
    values = {
        "batch_grid": a_grid(),
        "top_k": K,
        "temperatures": (2.0,),
        "value_type": tl.ElementType.FLOAT32,
        **given,
    }
    return tl.StudentProfile(teacher_id=teacher_id, **values)  # type: ignore[arg-type]


def some_rows(seed: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [N,S], lengths [N] and logits [N,S,V] of a step."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, WIDTH), generator=chance)
    lengths = torch.randint(2, WIDTH + 1, (rows,), generator=chance)
    lengths[0] = WIDTH
    return ids, lengths, torch.randn(rows, WIDTH, VOCABULARY + 6, generator=chance)


def flat(array: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The real positions of a rectangle."""
    return torch.cat([row[:length] for row, length in zip(array, lengths.tolist(), strict=True)])


def next_of(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The token that comes next, -1 at each row's last, flat."""
    following = torch.cat([ids[:, 1:], torch.full((len(ids), 1), -1)], 1).clone()
    following[torch.arange(len(ids)), lengths - 1] = -1
    return flat(following, lengths)


def expected(ids: torch.Tensor, lengths: torch.Tensor, logits: torch.Tensor) -> object:
    """What is to be kept of these rows."""
    return tl.select_top_k(
        flat(logits, lengths),
        k=K,
        temperatures=(1.0, 2.0),
        vocab_size=VOCABULARY,
        next_ids=next_of(ids, lengths),
    )

"""What callers give, read once: whole numbers from lists, arrays and tensors alike.

A length of 2.5 tokens, or a row called True, is a mistake of whoever counted, and the next number
that is made of it would be another one. So nothing is rounded here. Pure: a tensor is asked for its
``tolist``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from teacher_logits.errors import GridMismatchError, PayloadInvalidError, Violation
from teacher_logits.grid import is_size, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def whole_numbers(given: object, *, what: str) -> tuple[int, ...]:
    """Return a list, range, array or tensor [N] of whole numbers from 0 on.

    Raises:
        PayloadInvalidError: it is none, with ``what`` and the first that is no such number.
    """
    to_list = getattr(given, "tolist", None)
    listed = cast("Callable[[], object]", to_list)() if callable(to_list) else given
    if not isinstance(listed, Iterable) or isinstance(listed, str | bytes | Mapping):
        raise PayloadInvalidError(
            f"{what} is {reprlib.repr(listed)}: give a list or an array of whole numbers",
            facts={"what": what, "given": type(given).__name__},
        )
    numbers = tuple(listed)
    wrong = [at for at, each in enumerate(numbers) if not is_whole(each) or each < 0]
    if wrong:
        at = wrong[0]
        raise PayloadInvalidError(
            f"{what}[{at}] is {reprlib.repr(numbers[at])}: give whole numbers from 0 on",
            facts={"what": what, "place": at, "given": reprlib.repr(numbers[at])},
        )
    return tuple(int(each) for each in numbers)


@contextmanager
def as_violation(rule: str) -> Iterator[None]:
    """Have what is no number be a rule of a plan that is broken.

    Raises:
        GridMismatchError: in place of a ``PayloadInvalidError``.
    """
    try:
        yield
    except PayloadInvalidError as error:
        broken = Violation(rule=rule, message=error.message, facts=dict(error.facts))
        raise GridMismatchError([broken]) from None


def check_size(given: object, *, what: str) -> None:
    """Let a whole number of at least 1 pass.

    Raises:
        PayloadInvalidError: it is something else.
    """
    if not is_size(given):
        raise PayloadInvalidError(
            f"{what} is {given!r}: give a whole number of at least 1",
            facts={"what": what, "given": repr(given)},
        )


def check_sizes_given(**sizes: object) -> None:
    """Let sizes pass as ``check_size`` does, each by its name; None is none given.

    Raises:
        PayloadInvalidError: one is something else.
    """
    for what, given in sizes.items():
        if given is not None:
            check_size(given, what=what)


def check_count(given: object, *, what: str) -> None:
    """Let a whole number from 0 on pass.

    Raises:
        PayloadInvalidError: it is something else.
    """
    if not is_whole(given) or given < 0:
        raise PayloadInvalidError(
            f"{what} is {given!r}: give a whole number from 0 on",
            facts={"what": what, "given": repr(given)},
        )

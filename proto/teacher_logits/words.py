"""Words: what a caller gives where there are choices, as the choice or as its value in text.

Refuses what is neither by the argument's name, with the choices.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.errors import RequestInvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable

Word = TypeVar("Word", bound=enum.Enum)


def word_of(choices: type[Word], given: object, *, what: str, fit: Iterable[Word] = ()) -> Word:
    """Return the member of ``choices`` that ``given`` is, or is the value of.

    Where only some ``fit``, these are named; to refuse the others is not for here.

    Raises:
        RequestInvalidError: it is neither; ``what`` names the argument, and the choices follow.
    """
    try:
        return choices(given)
    except ValueError:
        words = ", ".join(repr(each.value) for each in fit or choices)
        raise RequestInvalidError(
            f"{what} has {given!r}, which is none of its choices: give one of {words}, or the "
            f"member of {choices.__name__}",
            facts={"argument": what, "given": str(given)},
        ) from None


def words_of(choices: type[Word], given: object, *, what: str) -> tuple[Word, ...]:
    """Return the members that ``given`` lists; one alone is a tuple of one."""
    if isinstance(given, str | choices):
        return (word_of(choices, given, what=what),)
    try:
        listed: Iterable[object] = iter(given)  # type: ignore[call-overload]
    except TypeError:
        listed = (given,)
    return tuple(word_of(choices, each, what=what) for each in listed)

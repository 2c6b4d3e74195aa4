"""What Ray says of a worker or an object that is gone says why, in an error of ours."""

from __future__ import annotations

import pytest

from teacher_logits.errors import ProducerLostError, RequestInvalidError
from teacher_logits_client.ray.fetching import fetch, typed_errors

ray = pytest.importorskip("ray")


def lost(error: Exception) -> str:
    with pytest.raises(ProducerLostError) as refusal, typed_errors("answers of step 5"):
        raise error
    return refusal.value.message


def test_an_actor_that_could_not_be_made_is_lost_with_what_it_raised() -> None:
    wrong = TypeError("missing 1 required keyword-only argument: 'data_parallel_rank'")
    trace = f"Traceback ...\n  File ...\nTypeError: {wrong}"
    raised = ray.exceptions.RayTaskError("T.__init__", trace, wrong)

    message = lost(ray.exceptions.ActorDiedError(raised))

    assert message == (
        f"answers of step 5: the process that made it is gone (ActorDiedError: TypeError: {wrong})"
    )


def test_an_error_that_says_nothing_is_told_by_its_kind() -> None:
    assert lost(ray.exceptions.WorkerCrashedError()).startswith(
        "answers of step 5: the process that made it is gone (WorkerCrashedError"
    )


def test_a_reference_in_place_of_a_list_of_them_is_refused_with_the_way_out() -> None:
    with pytest.raises(RequestInvalidError, match=r"losses: .*fetch\(\[reference\], \.\.\.\)"):
        fetch(ray.ObjectRef.nil(), what="losses")

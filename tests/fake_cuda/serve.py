"""A server whose engine writes to a pretended device. It is no test.

python -m tests.fake_cuda.serve SPEC now|late FLAGS...

With ``late`` what the engine's scores become on the device is given to a stream, and is written
when somebody waits for that. What lies there until then is what lay there before.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

from tests.fake_cuda.spec import Spec

from teacher_logits.device_memory import MemoryKind
from teacher_logits.selection import Selection, select_top_k
from teacher_logits_server import app
from teacher_logits_server.cli import read_config
from teacher_logits_server.engines import answers

if TYPE_CHECKING:
    import torch
    from tests.fake_cuda.driver import FakeCuda


def late_selection(
    driver: FakeCuda, logits: torch.Tensor, *, out: Selection, **given: object
) -> Selection:
    """Select as ``select_top_k`` does; what lies on the device is written by its stream."""
    actual, logits_kept = out.actual_logprob, out.topk_logits
    beside = replace(
        out,
        topk_ids=out.topk_ids.clone(),
        topk_logprobs=out.topk_logprobs.clone(),
        log_tail=out.log_tail.clone(),
        logsumexp=out.logsumexp.clone(),
        actual_logprob=None if actual is None else actual.clone(),
        status=out.status.clone(),
        topk_logits=None if logits_kept is None else logits_kept.clone(),
    )
    select_top_k(logits, out=beside, **given)  # type: ignore[call-overload]
    for field in fields(Selection):
        to, column = getattr(out, field.name), getattr(beside, field.name)
        if to is None:
            continue
        place = driver.locate(to.data_ptr())
        if place.kind is MemoryKind.PLAIN and place.device is not None:
            driver.enqueue(partial(to.copy_, column), device=place.device)
        else:
            to.copy_(column)
    return out


def main(spec: str, writes: str, *flags: str) -> int:
    """Serve, with the driver that a spec describes."""
    told = Spec.loads(spec)
    fake = told.fake()
    if writes == "late":
        vars(answers)["select_top_k"] = partial(late_selection, fake)
    return app.serve(read_config(flags), device_memory=told.around(fake))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

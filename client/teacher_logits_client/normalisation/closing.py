"""How a step is closed: one reduction to a report, and one rescale by what it says.

The vector that is reduced has the same length on every rank and in every step, whatever came in:

    per loss [ ranks whose gradients are not divided | bad counts | counts[B] | sums[B] ]

Promises that what is wrong is found in the reduced numbers, so by all ranks at once, before any
gradient is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client.normalisation.gradients import (
    RescaleOrder,
    divide_gradients,
    multiply_gradients,
)
from teacher_logits_client.normalisation.reductions import sum_over_ranks
from teacher_logits_client.normalisation.reports import LossReport, StepReport
from teacher_logits_client.normalisation.tally import weighted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.normalisation.reductions import Reduction
    from teacher_logits_client.normalisation.step_losses import StepLoss
    from teacher_logits_client.normalisation.tally import Tally


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all steps of a normaliser have in common; the same on every rank but for parameters."""

    losses: tuple[StepLoss, ...]
    are_trained: bool
    reduction: Reduction | None
    averaged_over: int
    order: RescaleOrder

    def said(self) -> str:
        """What all ranks have to say alike."""
        losses = [(each.name, each.weight, each.bin_weights) for each in self.losses]
        return f"losses {losses}, averaged over {self.averaged_over}, {self.order.value}"


def check_settings(reduction: object, order: object, *, averaged_over: int) -> None:
    """Let a reduction pass that can sum, and an order that there is.

    Raises:
        ConfigError: one of them is something else, such as a process group or a word; or there
            is no reduction, and gradients of several ranks are averaged.
    """
    if reduction is not None and not callable(getattr(reduction, "sum", None)):
        raise ConfigError(
            f"reduction is a {type(reduction).__name__}, which cannot sum; give "
            "GroupReduction(group), None for one process, or a Reduction of your own",
            facts={"given": type(reduction).__name__},
        )
    if reduction is None and averaged_over > 1:
        raise ConfigError(
            f"gradients_averaged_over is {averaged_over} and there is no reduction, so each rank "
            "would divide by its own count; give reduction=GroupReduction(group), or a Reduction "
            "of your own where counts are those of all ranks already",
            facts={"gradients_averaged_over": averaged_over},
        )
    if not isinstance(order, RescaleOrder):
        ways = ", ".join(f"RescaleOrder.{each.name}" for each in RescaleOrder)
        raise ConfigError(
            f"order is {order!r}, a {type(order).__name__}; give one of {ways}",
            facts={"given": type(order).__name__},
        )


def reduce_step(
    settings: Settings, tallies: Sequence[Tally], *, step: int, attempt: int
) -> StepReport:
    """Reduce the tallies over all ranks, once.

    Raises:
        RequestInvalidError: the ranks are at different steps, or have different losses.
        PayloadInvalidError: some rank had a count below 0, or one that is not finite.
        ConfigError: gradients on some rank are in none of the loss's parameters.
    """
    values = [value for tally in tallies for value in tally.values()]
    agreed = f"attempt {attempt} of step {step} with {settings.said()}"
    sums, ranks = sum_over_ranks(values, settings.reduction, agreed=agreed)
    losses: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    for loss in settings.losses:
        undivided, bad, *both = sums[: 2 + 2 * loss.bins]
        sums = sums[2 + 2 * loss.bins :]
        if bad:
            raise PayloadInvalidError(
                f"{bad:.0f} counts of the loss {loss.name!r} in step {step} were below 0 or not "
                "finite, over all ranks; a count is the sum of a mask that is at least 0",
                facts={"loss": loss.name, "step": step, "bad_counts": int(bad)},
            )
        if undivided:
            raise _undivided(loss, are_trained=settings.are_trained, step=step, ranks=undivided)
        losses[loss.name] = tuple(both[loss.bins :]), tuple(both[: loss.bins])
    reports = _reports(settings, losses)
    return StepReport(
        step=step,
        attempt=attempt,
        ranks=ranks,
        loss=sum(each.weight * reports[each.name].mean for each in settings.losses if each.weight),
        losses=reports,
        reason=_why_not(settings, reports),
    )


def _undivided(loss: StepLoss, *, are_trained: bool, step: int, ranks: float) -> ConfigError:
    names = "no loss was given"
    if are_trained:
        names = f"none of the {len(list(loss.parameters))} parameters that it was given has one"
    return ConfigError(
        f"backward was called on sums of the loss {loss.name!r} in step {step}, and on "
        f"{ranks:.0f} ranks its gradients would stay undivided: {names}; give "
        "StepLoss(parameters=list(model.parameters())), of the very model that is trained (after "
        "it was wrapped or replaced), or parameters=() to divide by the report's count yourself",
        facts={"loss": loss.name, "step": step, "ranks": int(ranks)},
    )


def _reports(
    settings: Settings, losses: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]
) -> dict[str, LossReport]:
    reports = {}
    for loss in settings.losses:
        sums, counts = losses[loss.name]
        denominator = weighted(loss, counts)
        # Sums over no count are 0, or what was masked got into them.
        counted = denominator > 0
        reports[loss.name] = LossReport(
            sums=sums if counted else (0.0,) * loss.bins,
            counts=counts,
            denominator=denominator,
            mean=weighted(loss, sums) / denominator if counted else 0.0,
        )
    return reports


def _why_not(settings: Settings, reports: dict[str, LossReport]) -> str | None:
    """Return why no optimizer should step, None where it should."""
    if not any(each.denominator > 0 for each in reports.values()):
        return "no loss counted anything"
    names = [each.name for each in settings.losses if each.weight]
    if not any(reports[name].denominator > 0 for name in names):
        return "no loss counted anything but those that weigh 0"
    wrong = [repr(name) for name in names if math.isnan(reports[name].mean)]
    return f"the loss {' and '.join(wrong)} is NaN" if wrong else None


def rescale_gradients(settings: Settings, report: StepReport) -> None:
    """Bring the gradients of raw sums to those of the means, in place.

    Those of a loss that weighs 0 become 0, which 0 times a NaN is not.
    """
    for loss in settings.losses:
        if loss.weight == 0:
            multiply_gradients(loss.parameters, 0.0)
    averaged = settings.averaged_over
    if settings.order is RescaleOrder.DIRECT:
        for loss in settings.losses:
            denominator = report.losses[loss.name].denominator
            divide_gradients(loss.parameters, denominator / averaged)
        return
    first, *others = settings.losses
    policy_count = report.losses[first.name].denominator
    for loss in settings.losses:
        multiply_gradients(loss.parameters, averaged / policy_count if policy_count > 0 else 0.0)
    for loss in others:
        own = report.losses[loss.name].denominator
        multiply_gradients(loss.parameters, policy_count / own if own > 0 else 0.0)

"""The state of a step over split micro batches: begin, microbatch, finish, abort.

Gradients are of raw sums until ``finish``, which reduces all sums and counts in one collective
and divides once (docs/math.md, "A step in parts"). Promises: the same loss and gradients for every
cut of the step's tokens into ranks and micro batches; no hang and no NaN where a rank has no tokens
or no loss counts any; a state that an abort leaves without a trace. Refuses a second step while one
is open, micro batches that come twice, and whatever belongs to an attempt that is over.

Not for several threads at once: a step has one loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits.grid import is_size, is_whole
from teacher_logits_client.normalisation.closing import (
    Settings,
    check_settings,
    reduce_step,
    rescale_gradients,
)
from teacher_logits_client.normalisation.gradients import RescaleOrder, empty_gradients
from teacher_logits_client.normalisation.step_errors import (
    RepeatedMicroBatchError,
    StaleAttemptError,
)
from teacher_logits_client.normalisation.step_losses import StepLoss, check_losses
from teacher_logits_client.normalisation.tally import Tally, weighted_loss

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from teacher_logits_client.normalisation.reductions import Reduction
    from teacher_logits_client.normalisation.reports import StepReport


class StepNormaliser:
    """Opens one step after the other, and holds each to its own attempt.

        normaliser = tl.StepNormaliser(
            tl.StepLoss(parameters=model.parameters()), reduction=tl.GroupReduction()
        )
        with normaliser.begin(step=7) as step:
            for number, micro_batch in enumerate(batch.micro_batches()):
                loss_sum, count = tl.losses.forward_kl(logits, micro_batch.targets, mask)
                step.microbatch(number, loss_sum, count).backward()
            report = step.finish()
        if report.should_step:
            optimizer.step()

    ``losses`` are the same on every rank, but for their parameters; without any, it is one loss
    without parameters, as an evaluation needs it. ``reduction`` None is one process.
    ``gradients_averaged_over`` is the number of ranks over which a framework averages gradients
    (DistributedDataParallel: its world size), 1 where it adds them up: its division is undone.

    Raises:
        ConfigError: losses that share a name or a parameter, fewer than one rank to average over
            or several without a reduction, a reduction that is none, or an order that is none.
    """

    def __init__(
        self,
        *losses: StepLoss,
        reduction: Reduction | None = None,
        gradients_averaged_over: int = 1,
        order: RescaleOrder = RescaleOrder.DIRECT,
    ) -> None:
        if not is_size(gradients_averaged_over):
            raise ConfigError(
                f"gradients_averaged_over is {gradients_averaged_over!r}; give the number of ranks "
                "over which gradients are averaged, 1 where they are added up",
                facts={"gradients_averaged_over": str(gradients_averaged_over)},
            )
        check_losses(losses)
        check_settings(reduction, order, averaged_over=gradients_averaged_over)
        self._settings = Settings(
            losses=losses or (StepLoss(),),
            are_trained=bool(losses),
            reduction=reduction,
            averaged_over=gradients_averaged_over,
            order=order,
        )
        self._last: OpenStep | None = None

    def begin(self, step: int, *, attempt: int | None = None) -> OpenStep:
        """Open a step with empty sums, counts and gradients.

        ``attempt`` is 0 for a step that is new, and one more each time that the same step is
        begun again; all ranks have the same. Given, it has to be later than the last.

        Raises:
            RequestInvalidError: a step is open, or a number is no whole number.
            StaleAttemptError: this attempt of the step, or a later one, is over.
        """
        _check_numbers(step=step, attempt=0 if attempt is None else attempt)
        last = self._last
        if last is not None and last.is_open:
            raise RequestInvalidError(
                f"step {step} begins while attempt {last.attempt} of step {last.step} is open; "
                "finish or abort that one first",
                facts={"step": step, "open_step": last.step, "open_attempt": last.attempt},
            )
        lowest = last.attempt + 1 if last is not None and last.step == step else 0
        attempt = lowest if attempt is None else attempt
        if attempt < lowest:
            raise StaleAttemptError(
                f"attempt {attempt} of step {step} begins, and attempt {lowest - 1} is over; the "
                f"next is {lowest}",
                facts={"step": step, "attempt": attempt, "next_attempt": lowest},
            )
        self._last = OpenStep(self._settings, step=step, attempt=attempt)
        return self._last

    def abort(self) -> None:
        """Abort the step that is open, if one is: as ``OpenStep.abort``."""
        if self._last is not None:
            self._last.abort()


class OpenStep:
    """One attempt at a step. Leaving it as a context by an error aborts it.

    It is open until ``finish`` or ``abort``; then every call but ``abort`` is refused, so a
    micro batch of an older attempt that comes late changes nothing.
    """

    def __init__(self, settings: Settings, *, step: int, attempt: int) -> None:
        self.step = step
        self.attempt = attempt
        self._settings = settings
        self._over: str | None = None
        self._empty()

    @property
    def is_open(self) -> bool:
        """Whether it was neither finished nor aborted."""
        return self._over is None

    def __enter__(self) -> OpenStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        was_open = self.is_open
        self.abort()
        if was_open and kind is None:
            raise RequestInvalidError(
                f"attempt {self.attempt} of step {self.step} was left without finish, so it was "
                "aborted; call finish once all micro batches are in, or abort",
                facts={"step": self.step, "attempt": self.attempt},
            )

    def microbatch(
        self,
        number: int | str,
        loss_sum: torch.Tensor,
        count: torch.Tensor | float,
        *,
        loss: str | None = None,
    ) -> torch.Tensor:
        """Add a micro batch's sum and count, and return the scalar to call ``backward`` on.

        ``loss_sum`` is undivided, a scalar or [B] with B bins, and ``count`` has the same shape.
        ``number`` is the micro batch's own on this rank. ``loss`` names which of several losses
        this is of. The scalar is the weighted sum, undivided too; of several losses, add them up
        and call ``backward`` once. An evaluation leaves it. Where the loss has parameters, a
        ``backward`` that comes when the attempt is over raises ``StaleAttemptError``.

        Raises:
            StaleAttemptError: the attempt is over.
            RepeatedMicroBatchError: this loss has the micro batch already.
            RequestInvalidError: no such loss, none named among several, or a ``number`` that is
                neither a whole number nor text.
            PayloadInvalidError: not one floating-point sum and one count a bin.
            ConfigError: it needs a gradient, and the loss's parameters turned out to be none.
        """
        self._check_open(f"micro batch {number}")
        if not (isinstance(number, str) or is_whole(number)):
            raise RequestInvalidError(
                f"micro batch {number!r} is a {type(number).__name__}; number it by a whole number "
                "or a name, its own on this rank",
                facts={"given": type(number).__name__},
            )
        tally = self._find(loss)
        if tally.has(number):
            raise RepeatedMicroBatchError(
                f"micro batch {number} of the loss {tally.loss.name!r} comes a second time in "
                f"attempt {self.attempt} of step {self.step}; each counts once. To do the step "
                "again, abort and begin it anew",
                facts={"micro_batch": number, "step": self.step, "attempt": self.attempt},
            )
        tally.add(number, loss_sum, count)
        if loss_sum.requires_grad and tally.loss.parameters:
            # Its gradient would stay undivided, among those of whatever step is next.
            loss_sum.register_hook(lambda _: self._check_open(f"backward of micro batch {number}"))
        return weighted_loss(tally.loss, loss_sum)

    def finish(self) -> StepReport:
        """Reduce once, divide the gradients, close the step, and say what it came to.

        Every rank calls it, with micro batches or without; call ``backward`` before. Afterwards,
        in this order: what the framework itself does once a step, ``gradient_norms``, clipping,
        the optimizer. A finish that fails has aborted the step; what is wrong with counts or
        steps fails on all ranks alike.

        Raises:
            StaleAttemptError: the attempt is over.
            RequestInvalidError: the ranks are at different steps, or have different losses.
            PayloadInvalidError: some rank had a count below 0, or one that is not finite.
            ConfigError: backward was called, and no parameter of the loss has a gradient.
        """
        self._check_open("finish")
        try:
            report = reduce_step(
                self._settings, list(self._tallies.values()), step=self.step, attempt=self.attempt
            )
            rescale_gradients(self._settings, report)
        except BaseException:
            self.abort()
            raise
        self._over = "finished"
        return report

    def abort(self) -> None:
        """Drop sums, counts and gradients. What is over already stays as it is."""
        if self.is_open:
            self._over = "aborted"
            self._empty()

    def _empty(self) -> None:
        settings = self._settings
        self._tallies = {
            loss.name: Tally(loss, is_trained=settings.are_trained) for loss in settings.losses
        }
        for loss in self._settings.losses:
            empty_gradients(loss.parameters)

    def _check_open(self, what: str) -> None:
        if self._over is not None:
            raise StaleAttemptError(
                f"{what} of attempt {self.attempt} of step {self.step} comes after it was "
                f"{self._over}; begin the step again",
                facts={"step": self.step, "attempt": self.attempt, "state": self._over},
            )

    def _find(self, name: str | None) -> Tally:
        names = list(self._tallies)
        if name is None and len(names) == 1:
            return self._tallies[names[0]]
        if name is None or name not in self._tallies:
            raise RequestInvalidError(
                f"the step has the losses {names}, and the one named is {name!r}; say which one "
                "the sum is of",
                facts={"loss": name or "", "losses": ", ".join(names)},
            )
        return self._tallies[name]


def _check_numbers(**numbers: object) -> None:
    for name, number in numbers.items():
        if not (is_whole(number) and number >= 0):
            raise RequestInvalidError(
                f"{name} is {number!r}, a {type(number).__name__}; give a whole number from 0 on",
                facts={name: repr(number)},
            )

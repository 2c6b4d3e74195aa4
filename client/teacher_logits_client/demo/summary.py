"""What came of the demo: figures, what they had to show, as text, JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text

if TYPE_CHECKING:
    from pathlib import Path

    from teacher_logits.terms import Check
    from teacher_logits.transport import Refusal, Transport
    from teacher_logits_client.demo.evaluation import Quality
    from teacher_logits_client.demo.training import Training

RESULTS = "results.json"
PLOT = "loss.png"


@dataclass(frozen=True, kw_only=True)
class Parties:
    """Who took part, in which process each, and over what they spoke."""

    teacher_name: str
    teacher_pid: int
    teacher_revision: str
    teacher_arithmetic: str
    student_pid: int
    vocabulary_size: int
    transport: Transport | None
    refusals: tuple[Refusal, ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Showing:
    """One thing that the demo had to show, and whether it did."""

    name: str
    holds: bool
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The training, and the student on held-out text on either side of it."""

    training: Training
    before: Quality
    after: Quality
    teacher_perplexity: float
    held_out_tokens: int
    student_parameters: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All figures of one run. Perplexities and divergences are of the held-out text."""

    parties: Parties
    learned: Learned
    unigram_perplexity: float
    total_seconds: float

    @property
    def showings(self) -> tuple[Showing, ...]:
        """What had to be shown: the student learned, and it learned more than frequencies."""
        before, after = self.learned.before, self.learned.after
        return (
            Showing(
                name="divergence_fell",
                holds=after.divergence < before.divergence,
                sentence=f"divergence from the teacher (KL a token, tail as a bucket): "
                f"{before.divergence:.3f} nats before, {after.divergence:.3f} after",
            ),
            Showing(
                name="perplexity_fell",
                holds=after.perplexity < before.perplexity,
                sentence=f"perplexity: {before.perplexity:,.1f} before, {after.perplexity:,.1f} "
                f"after (the teacher's own: {self.learned.teacher_perplexity:,.1f})",
            ),
            Showing(
                name="beats_unigram",
                holds=after.perplexity < self.unigram_perplexity,
                sentence=f"the training text's token frequencies alone: "
                f"{self.unigram_perplexity:,.1f}, which the student has to be below",
            ),
        )

    @property
    def holds(self) -> bool:
        """Whether everything was shown."""
        return all(showing.holds for showing in self.showings)

    def to_text(self) -> str:
        """Return the last lines of the demo."""
        who, learned, training = self.parties, self.learned, self.learned.training
        transport = who.transport.value if who.transport else "none"
        lines = [
            f"teacher      {who.teacher_name} in process {who.teacher_pid}, "
            f"{who.teacher_arithmetic}, {who.vocabulary_size:,} ids",
            f"student      {learned.student_parameters / 1e6:.1f} million parameters in process "
            f"{who.student_pid}, random at the start",
            f"transport    {transport}",
            *(
                f"  refused    {r.transport.value}: {r.reason.value}, {r.message}"
                for r in who.refusals
            ),
            *(f"  check      {c.name}: {c.verdict.value}, {c.detail}" for c in who.checks),
            f"training     {len(training.losses)} steps in {span_text(training.seconds)}; teacher "
            f"{training.teacher_tokens_per_second:,.0f} tokens/s; the student waited for it "
            f"{100 * training.waiting_share:.1f} % of the time",
            f"held out     {learned.held_out_tokens:,} tokens",
            *(f"  {'yes' if s.holds else 'NO ':<3}        {s.sentence}" for s in self.showings),
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all figures as one JSON object with stable keys."""
        learned, training = self.learned, self.learned.training
        document = {
            "holds": self.holds,
            "showings": {showing.name: showing.holds for showing in self.showings},
            **_parties_json(self.parties),
            "student": {
                "pid": self.parties.student_pid,
                "parameters": learned.student_parameters,
            },
            "training": {
                "steps": len(training.losses),
                "seconds": training.seconds,
                "waited_seconds": training.waited_seconds,
                "waiting_share": training.waiting_share,
                "teacher_tokens": training.teacher_tokens,
                "teacher_tokens_per_second": training.teacher_tokens_per_second,
                "losses": training.losses,
            },
            "held_out": {
                "tokens": learned.held_out_tokens,
                "before": asdict(learned.before),
                "after": asdict(learned.after),
                "teacher_perplexity": learned.teacher_perplexity,
                "unigram_perplexity": self.unigram_perplexity,
            },
            "total_seconds": self.total_seconds,
        }
        return json.dumps(document, indent=2)


def _parties_json(parties: Parties) -> dict[str, object]:
    return {
        "transport": parties.transport.value if parties.transport else None,
        "refusals": [
            {
                "transport": refusal.transport.value,
                "reason": refusal.reason.value,
                "message": refusal.message,
            }
            for refusal in parties.refusals
        ],
        "checks": [
            {"name": check.name, "verdict": check.verdict.value, "detail": check.detail}
            for check in parties.checks
        ],
        "teacher": {
            "name": parties.teacher_name,
            "pid": parties.teacher_pid,
            "revision": parties.teacher_revision,
            "arithmetic_type": parties.teacher_arithmetic,
            "vocabulary_size": parties.vocabulary_size,
        },
    }


def draw_losses(outcome: Outcome, path: Path) -> None:
    """Draw the loss of each step, and what was measured on held-out text, into a PNG."""
    from matplotlib.figure import Figure

    losses = outcome.learned.training.losses
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="0.7", linewidth=0.8, label="each step")
    axes.plot(steps, smoothed(losses), color="tab:blue", label="smoothed")
    ends = (outcome.learned.before.divergence, outcome.learned.after.divergence)
    axes.plot((0, len(losses)), ends, "o", color="tab:red", label="held-out text")
    axes.set_xlabel("step")
    axes.set_ylabel("KL (teacher ‖ student) a token, nats")
    transport = outcome.parties.transport
    axes.set_title(
        f"A student learns from {outcome.parties.teacher_name} over "
        f"{transport.value if transport else 'nothing'}"
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def smoothed(losses: tuple[float, ...], keep: float = 0.9) -> list[float]:
    """Return a running mean in which each step before counts ``keep`` times as much."""
    mean, weight, out = 0.0, 0.0, []
    for loss in losses:
        mean, weight = keep * mean + loss, keep * weight + 1
        out.append(mean / weight)
    return out

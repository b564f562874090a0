"""Warn about a running training, by a table of rules for RL and a table for SFT. The rules read the metrics of steps.

Other modules: checks/ warns before a run, and signal_watch.py counts the steps without learning signal.

    metrics of a step -> each rule reads the first steps and the last steps -> event `warning`, with the rule's name
                                                                            -> end of the run, if `stop_on` names it
                                                            -> end of the training with its best checkpoint as result,
                                                               if `roll_back_on` names it

A rule warns when its bound is crossed, and again only after a step in which the bound was kept. The rules only read
metrics, so a rule changes a training only by ending it. In a resumed run, the rules do not see the metrics of earlier
attempts.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rollouts_core.errors import StoppedByRuleError
from rollouts_core.metrics import EventLog
from rollouts_core.model.weight_sample import ARRIVED, CHANGED, FEW_ARRIVED, ROUNDING_REMEDY, describe_loss
from rollouts_core.signal_watch import SignalWatch

logger = logging.getLogger(__name__)

WINDOW = 100
"""Number of last steps whose metrics rules can read."""
MEAN_STEPS = 10
"""Number of steps in the means that rules compare. The metrics of single steps are noisy."""
IN_A_ROW = 3
MIN_ENTROPY_SHARE = 0.1
SPIKE = 10.0
MIN_KNOWN = 20
"""Smallest number of known gradient norms at which a norm can count as a spike."""
MAX_MISMATCH = 0.05
MAX_STALENESS = 4.0
MAX_LOSS_RISE = 1.5
NOISE = 4.0
"""A change of a mean by less than this number of standard errors may be noise."""
Line = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The metrics of a training's steps that rules can read."""

    first: Sequence[Line]
    """Metrics of the first steps."""
    last: Sequence[Line]
    """Metrics of the last steps, in order."""

    def values(self, name: str) -> list[float]:
        """The values of a metric in the last steps; steps without the metric are left out."""
        return _values(self.last, name)

    def recent(self, name: str, count: int = MEAN_STEPS) -> list[float]:
        """The last `count` values of a metric; empty if there are fewer than `count`."""
        values = self.values(name)
        return values[-count:] if len(values) >= count else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that warns about a training, by the metrics of its steps."""

    name: str
    measures: str
    bound: str
    remedy: str
    """The advice to the user: which settings to change."""
    find: Callable[[Series], str]
    """Returns a clause with the measured values if the bound is crossed, otherwise ""."""


def _values(lines: Sequence[Line], name: str) -> list[float]:
    return [line[name] for line in lines if math.isfinite(line.get(name, math.nan))]


def find_halved_reward(series: Series) -> str:
    """Compare the mean reward of the last steps with the best earlier mean over the same number of steps."""
    name = "reward_unfiltered" if "reward_unfiltered" in series.last[-1] else "reward"
    earlier, last, noise = _compare_means(series.values(name))
    if not earlier or (best := max(earlier)) <= 0 or last >= best / 2 or best - last < NOISE * noise:
        return ""
    return f"the mean reward of {MEAN_STEPS} steps fell from {best:.3g} to {last:.3g}"


def find_risen_loss(series: Series) -> str:
    """Compare the mean loss of the last steps with the lowest earlier mean over the same number of steps."""
    earlier, last, noise = _compare_means(series.values("loss"))
    if not earlier or last <= MAX_LOSS_RISE * (best := min(earlier)) or last - best < NOISE * noise:
        return ""
    return f"the mean loss of {MEAN_STEPS} steps rose from {best:.3g} to {last:.3g}"


def _compare_means(values: Sequence[float]) -> tuple[list[float], float, float]:
    """The earlier means over MEAN_STEPS values in a row, the mean of the last MEAN_STEPS values, and its standard
    error.

    No earlier mean shares a step with the last mean. Without enough values the list of earlier means is empty.
    """
    means = [statistics.fmean(values[end - MEAN_STEPS : end]) for end in range(MEAN_STEPS, len(values) + 1)]
    if len(means) <= MEAN_STEPS:
        return [], math.nan, math.nan
    return means[:-MEAN_STEPS], means[-1], statistics.stdev(values[-MEAN_STEPS:]) / math.sqrt(MEAN_STEPS)


def find_entropy_collapse(series: Series) -> str:
    """Compare the entropy of the last steps with the entropy of the first steps.

    If the rewards now differ less than half as much as at the start, the task counts as solved and gives no warning.
    """
    before, after = _values(series.first, "entropy"), series.recent("entropy")
    spread_before, spread = _values(series.first, "reward_std"), series.recent("reward_std")
    if len(before) < MEAN_STEPS or not after or not spread_before or not spread:
        return ""
    first, last = statistics.fmean(before), statistics.fmean(after)
    if last >= MIN_ENTROPY_SHARE * first or statistics.fmean(spread) < statistics.fmean(spread_before) / 2:
        return ""
    return f"the mean entropy fell from {first:.3g} to {last:.3g} nats, and the task is not solved"


def find_truncation(series: Series) -> str:
    shares = series.recent("truncated_share", IN_A_ROW)
    return f"all completions of {IN_A_ROW} steps in a row were cut off" if shares and min(shares) == 1 else ""


def find_gradient_spikes(series: Series) -> str:
    norms = series.values("grad_norm")
    if len(norms) < MIN_KNOWN or not (usual := statistics.median(norms)):
        return ""
    spikes = [norm for norm in norms[-MEAN_STEPS:] if norm > SPIKE * usual]
    if len(spikes) < IN_A_ROW:
        return ""
    return f"the gradient norm of {len(spikes)} of {MEAN_STEPS} steps was up to {max(spikes):.3g}, usually {usual:.3g}"


def find_mismatch(series: Series) -> str:
    clause = "engine and trainer differ by a KL of {:.3g} nats per token"
    return _describe_high_mean(series, "mismatch_kl", MAX_MISMATCH, clause)


def find_staleness(series: Series) -> str:
    return _describe_high_mean(series, "staleness_mean", MAX_STALENESS, "tokens are {:.3g} publications of weights old")


def _describe_high_mean(series: Series, name: str, bound: float, clause: str) -> str:
    values = series.recent(name)
    if not values or (mean := statistics.fmean(values)) <= bound:
        return ""
    return f"{clause.format(mean)}, mean of {MEAN_STEPS} steps"


def find_unparsed_calls(series: Series) -> str:
    shares = series.recent("parse_failure_share", IN_A_ROW)
    return f"no turn of {IN_A_ROW} steps in a row could be parsed" if shares and min(shares) == 1 else ""


def find_rounding(series: Series) -> str:
    line = next((line for line in reversed(series.last) if ARRIVED in line), None)
    return describe_loss(line[ARRIVED], line[CHANGED]) if line and line[ARRIVED] < FEW_ARRIVED else ""


NO_SIGNAL_RULE = Rule(
    name="no_signal",
    measures="steps in a row without an update by rewards",
    bound="10, 20, 40 and so on",
    remedy="use prompts that the model solves sometimes, raise rollout.n_samples_per_prompt, or change the reward",
    find=lambda _: "",  # signal_watch.py counts the steps instead, because a resumed run must continue the count
)
SPIKES_RULE = Rule(
    name="gradient_spikes",
    measures=f"gradient norms of {MEAN_STEPS} steps, against the median of the last {WINDOW}",
    bound=f"{IN_A_ROW} are {SPIKE:g} times as large",
    remedy="lower training.rl.optim.lr or training.rl.optim.max_grad_norm",
    find=find_gradient_spikes,
)
RL_RULES = (
    NO_SIGNAL_RULE,
    Rule(
        name="reward_halved",
        measures=f"mean reward of {MEAN_STEPS} steps, against the best of the last {WINDOW}",
        bound="below a half, and by more than noise",
        remedy="lower training.rl.optim.lr, or set training.rl.loss.kl_coef; earlier checkpoints are kept",
        find=find_halved_reward,
    ),
    Rule(
        name="entropy_collapse",
        measures=f"mean entropy of {MEAN_STEPS} steps, against the first {MEAN_STEPS}",
        bound="below a tenth, while rewards differ at least half as much as then",
        remedy="set training.rl.loss.entropy_coef, raise training.rl.loss.clip_high, or lower training.rl.optim.lr",
        find=find_entropy_collapse,
    ),
    Rule(
        name="all_truncated",
        measures="share of completions that a limit ended",
        bound=f"1, {IN_A_ROW} steps in a row",
        remedy="raise rollout.sampling.max_new_tokens, or reward shorter completions",
        find=find_truncation,
    ),
    SPIKES_RULE,
    Rule(
        name="engine_mismatch",
        measures=f"KL between engine and trainer, mean of {MEAN_STEPS} steps",
        bound=f"above {MAX_MISMATCH:g} nats per token",
        remedy="set training.rl.loss.mismatch, or the same rollout.engine.dtype as the trainer's precision",
        find=find_mismatch,
    ),
    Rule(
        name="staleness",
        measures=f"age of the sampled tokens, mean of {MEAN_STEPS} steps",
        bound=f"above {MAX_STALENESS:g} publications",
        remedy="lower rollout.max_staleness",
        find=find_staleness,
    ),
    Rule(
        name="unparsed_calls",
        measures="share of turns that the environment could not read",
        bound=f"1, {IN_A_ROW} steps in a row",
        remedy="show the form of a tool call in the prompts, or train it by SFT first",
        find=find_unparsed_calls,
    ),
    Rule(
        name="rounded_updates",
        measures="share of the update that arrives in the engines",
        bound=f"below {FEW_ARRIVED:g}",
        remedy=ROUNDING_REMEDY,
        find=find_rounding,
    ),
)
"""The rules of RL. Each rule can warn; a rule in `training.rl.stop_on` or `training.rl.roll_back_on` also ends the
training."""
SFT_RULES = (
    Rule(
        name="loss_risen",
        measures=f"mean loss of {MEAN_STEPS} steps, against the lowest of the last {WINDOW}",
        bound=f"above {MAX_LOSS_RISE:g} times, and by more than noise",
        remedy=(
            "lower training.sft.optim.lr, or raise training.sft.optim.num_warmup_steps; earlier checkpoints are kept"
        ),
        find=find_risen_loss,
    ),
    replace(SPIKES_RULE, remedy="lower training.sft.optim.lr or training.sft.optim.max_grad_norm"),
)
"""The rules of SFT. Each rule can warn; a rule in `training.sft.stop_on` or `training.sft.roll_back_on` also ends the
training."""


class WarningWatch:
    """Applies the rules to the metrics of each step.

    Args:
        signal: counts the steps without learning signal and has its own limit; None for SFT.
        stop_on: names of the rules that end the training.
        roll_back_on: names of the rules that end the training with its best checkpoint as the result.
        section: the section of the settings with `stop_on` and `roll_back_on`.
    """

    def __init__(
        self,
        signal: SignalWatch | None,
        stop_on: Collection[str] = (),
        roll_back_on: Collection[str] = (),
        *,
        rules: Sequence[Rule] = RL_RULES,
        section: str = "training.rl",
    ) -> None:
        self.signal, self.stop_on, self.roll_back_on = signal, stop_on, roll_back_on
        self.rules, self.section = rules, section
        self._first: list[Line] = []
        self._last: deque[Line] = deque(maxlen=WINDOW)
        self._crossed: set[str] = set()
        self._end = ""
        self._roll_back: tuple[str, str] | None = None
        """The first rule in `roll_back_on` that warned, and its warning."""

    @property
    def is_over(self) -> bool:
        """True if the training ends after this step."""
        return self._is_stopped or self._roll_back is not None

    @property
    def roll_back_rule(self) -> str:
        """The rule that makes the best checkpoint the training's result; empty without one, or if the run stops."""
        return self._roll_back[0] if self._roll_back and not self._is_stopped else ""

    @property
    def _is_stopped(self) -> bool:
        return bool(self._end) or (self.signal is not None and self.signal.is_over)

    def after_step(self, step: int, metrics: Line, events: EventLog | None = None) -> None:
        """Apply the rules to a step. Each warning is logged and written to `events`."""
        if self.signal and (told := self.signal.after_step(step, metrics)):
            warn(step, NO_SIGNAL_RULE.name, told, events)
        self._last.append(metrics)
        if len(self._first) < MEAN_STEPS:
            self._first.append(metrics)
        series = Series(first=self._first, last=tuple(self._last))
        for rule in self.rules:
            found = rule.find(series)
            if found and rule.name not in self._crossed:
                sentence = f"step {step}: {found}: {rule.remedy}"
                warn(step, rule.name, sentence, events)
                if rule.name in self.stop_on:
                    self._end = (
                        f"{sentence}. The training ended here, by the rule {rule.name}, and the step is saved. To "
                        f"resume, take {rule.name} out of {self.section}.stop_on"
                    )
                if rule.name in self.roll_back_on and self._roll_back is None:
                    self._roll_back = rule.name, sentence
            (self._crossed.add if found else self._crossed.discard)(rule.name)

    def check(self, *, is_rolled_back: bool = False) -> None:
        """Raise an error if the training ends here without a result.

        Args:
            is_rolled_back: the best checkpoint is the training's result.

        Raises:
            NoSignalError: too many steps in a row had no learning signal.
            StoppedByRuleError: a rule in `stop_on` raised its warning, or a rule in `roll_back_on` before any
                checkpoint had a score.
        """
        if self.signal:
            self.signal.check()
        if self._end:
            raise StoppedByRuleError(self._end)
        if self._roll_back and not is_rolled_back:
            rule, sentence = self._roll_back
            raise StoppedByRuleError(
                f"{sentence}. The rule {rule} rolls back to the best checkpoint, but no checkpoint has a score yet. "
                f"The training ended here, and the step is saved. Lower {self.section}.checkpoint_every, or take "
                f"{rule} out of {self.section}.roll_back_on"
            )


def warn(step: int, rule: str, message: str, events: EventLog | None) -> None:
    """Write a warning to `events`, or only log it if there is no event log."""
    if events:
        events.warn(message, rule=rule, step=step)
    else:
        logger.warning("%s", message)

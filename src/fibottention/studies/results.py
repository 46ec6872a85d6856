"""What the runs of a study gave: means, spreads, differences; as plain data and as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low, stdev
from typing import Any, Literal

from fibottention.studies.plan import PlannedRun, Score, Study
from fibottention.training.run import Run

__all__ = ["RunResult", "Summary", "VariantResult", "collect", "table_rows", "to_markdown"]

State = Literal["finished", "diverged", "not finished"]


@dataclass(frozen=True)
class Summary:
    """Mean and spread of some numbers.

    Attributes:
        mean: Mean.
        deviation: Standard deviation of the sample (divided by n - 1); None for fewer than two numbers.
        count: How many numbers.
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary | None":
        """The summary of numbers; None if there is none."""
        if not values:
            return None
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def text(self, score: Score, signed: bool = False) -> str:
        """``mean ± deviation``."""
        mean = score.text(self.mean, signed)
        return mean if self.deviation is None else f"{mean} ± {score.text(self.deviation)}"


@dataclass(frozen=True)
class RunResult:
    """What one run gave.

    Attributes:
        run: The run as planned.
        state: Whether it has ended, and how.
        best: The study's metric at the best epoch.
        last: The same at the last epoch that has it.
        curve: Epochs that have it, and the metric after them.
        summary: The run's ``summary.json``.
    """

    run: PlannedRun
    state: State
    best: float = math.nan
    last: float = math.nan
    curve: tuple[tuple[int, float], ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VariantResult:
    """What all finished runs of a variant in a setting gave.

    Attributes:
        setting: Name of the setting.
        variant: Name of the variant.
        runs: One result per seed.
        best: The study's metric at the best epoch.
        last: The same at the last epoch.
        difference: The latter minus that of the reference with the same seed.
    """

    setting: str
    variant: str
    runs: tuple[RunResult, ...]
    best: Summary | None
    last: Summary | None
    difference: Summary | None

    @property
    def finished(self) -> tuple[RunResult, ...]:
        """The runs that have ended well."""
        return tuple(run for run in self.runs if run.state == "finished")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "setting": self.setting,
            "variant": self.variant,
            **{
                name: None if value is None else {"mean": value.mean, "sd": value.deviation, "count": value.count}
                for name, value in (
                    ("best", self.best),
                    ("last", self.last),
                    ("difference", self.difference),
                )
            },
            "runs": [
                {
                    "seed": run.run.seed,
                    "state": run.state,
                    "folder": run.run.path,
                    **({"best": run.best, "last": run.last} if run.state == "finished" else {}),
                }
                for run in self.runs
            ],
        }


def collect(study: Study, folder: Path, diverged: dict[str, str]) -> list[VariantResult]:
    """Read what the runs in a study's folder have given so far.

    Args:
        study: The study.
        folder: Its folder.
        diverged: Runs whose loss became infinite, by their folder in the study's.
    """
    results: dict[tuple[str, str], list[RunResult]] = {}
    for planned in study.runs:
        results.setdefault((planned.setting, planned.variant), []).append(
            _read(planned, folder, diverged, study.score.name)
        )
    summaries = []
    for (setting, variant), runs in results.items():
        finished = [run for run in runs if run.state == "finished"]
        reference = {run.run.seed: run for run in results[setting, study.reference] if run.state == "finished"}
        pairs = [(run, reference[run.run.seed]) for run in finished if run.run.seed in reference]
        summaries.append(
            VariantResult(
                setting,
                variant,
                tuple(runs),
                Summary.of([run.best for run in finished]),
                Summary.of([run.last for run in finished]),
                None if variant == study.reference else Summary.of([a.last - b.last for a, b in pairs]),
            )
        )
    order = {name: i for i, name in enumerate(study.variants)}
    return sorted(summaries, key=lambda result: (study.settings.index(result.setting), order[result.variant]))


def _read(planned: PlannedRun, folder: Path, diverged: dict[str, str], metric: str) -> RunResult:
    run = Run(folder / planned.path)
    if planned.path in diverged:
        return RunResult(planned, "diverged")
    summary = run.read_json("summary.json")
    if summary is None:
        return RunResult(planned, "not finished")
    # Rollouts are not of every epoch.
    curve = tuple((record["epoch"], record[metric]) for record in run.metrics() if metric in record)
    return RunResult(planned, "finished", summary[metric], curve[-1][1], curve, summary)


def table_rows(study: Study, results: Sequence[VariantResult]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the study's table."""
    several = len(study.settings) > 1
    header = [
        *(["setting"] if several else []),
        "variant",
        "seeds",
        f"{study.score.label}, last epoch{study.score.unit}",
    ]
    header += [
        f"minus {study.reference}",
        f"best epoch{study.score.unit}",
        "parameters",
        "pairs kept",
        "attention MACs",
        "ms a step",
    ]
    rows = []
    for result in results:
        finished = result.finished
        counts = f"{len(finished)}"
        for state in ("diverged", "not finished"):
            if number := sum(run.state == state for run in result.runs):
                counts += f" ({number} {state})"
        row = [*([result.setting] if several else []), result.variant, counts]
        row.append(result.last.text(study.score) if result.last else "")
        row.append(result.difference.text(study.score, signed=True) if result.difference else "")
        row.append(result.best.text(study.score) if result.best else "")
        row += _cost(finished[0].summary, finished) if finished else [""] * 4
        rows.append(row)
    return header, rows


def _cost(summary: dict[str, Any], finished: Sequence[RunResult]) -> list[str]:
    attention = summary["attention"]
    times = [time for run in finished if (time := run.summary["step_milliseconds"]) is not None]
    return [
        f"{summary['parameters'] / 1e6:.3f} M",
        "" if attention is None or not attention["pairs"] else f"{attention['pairs']:.2%}",
        "" if attention is None else f"{attention['macs'] / 1e6:.2f} M",
        f"{median_low(times):.0f}" if times else "",
    ]


def to_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)

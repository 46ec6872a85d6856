"""Run a study, run by run, and keep its table, picture and page up to date."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from fibottention.analysis.report import encode_figure, write_page
from fibottention.errors import DivergedError, UserError
from fibottention.studies.plan import PlannedRun, Study
from fibottention.studies.plots import curves_figure, results_figure
from fibottention.studies.results import VariantResult, collect, table_rows, to_markdown
from fibottention.tasks.options import make_config
from fibottention.tasks.runs import check_run, load_config, train_run
from fibottention.training.run import Run, write_atomically, write_figure

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["RESULT_NOTE", "run_study"]

RESULT_NOTE = (
    "Mean ± standard deviation over the seeds (n - 1). Differences are between runs with the same seed. The best epoch "
    "is chosen on the same images that it is measured on, so it is a little too high."
)
_DIVERGED = "diverged.json"


def run_study(
    study: Study, folder: Path, *, command: str, console: Console, main_process: bool = True
) -> list[VariantResult]:
    """Make the runs of a study that its folder lacks, go on with those that were stopped, and write what they give.

    The folder gets ``results.md``, ``results.json``, ``results.png`` and ``report.html``, anew after each run.

    Args:
        study: The study.
        folder: Its folder; new, or one in which the study was begun.
        command: The command that repeats the study.
        console: Where to report.
        main_process: Whether this process writes.

    Returns:
        What the study gave, by variant.

    Raises:
        UserError: If an option is not valid, or a run in the folder has other options.
    """
    other = (Run(folder).read_json("results.json") or {}).get("study", study.name)
    if other != study.name:
        raise UserError(f"{folder} holds the study {other!r}; name another folder for {study.name!r} with --output")
    pending = [run for run in study.runs if not _is_finished(run, folder)]
    _check_start(pending)
    results: list[VariantResult] = []
    with _locked(folder) if main_process else contextlib.nullcontext():
        if main_process and not pending:
            results = _write(study, folder, command)
        for number, planned in enumerate(study.runs, 1):
            if planned not in pending:
                continue
            name = ", ".join(part for part in (planned.setting, planned.variant, f"seed {planned.seed}") if part)
            if main_process:
                console.rule(f"run {number} of {len(study.runs)}: {name}")
            _run(planned, folder, command, console, main_process)
            if main_process:
                results = _write(study, folder, command)
    return results


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second study out of the folder, which would take the runs of this one for abandoned."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{folder} is in use by another study, which runs now") from error
        yield


def _is_finished(planned: PlannedRun, folder: Path) -> bool:
    """Whether a run has ended; refuses a run with other options, or made by another number of processes."""
    run = Run(folder / planned.path)
    if not run.config_path.exists():
        return planned.path in _diverged([planned], folder)
    given = run.read_yaml().get("given")
    saved = (make_config(given) if given else load_config(run)).essence()
    wanted = planned.config.essence()
    if saved != wanted:
        differing = [
            f"{group}.{option}"
            for group, options in wanted.items()
            if isinstance(options, dict)
            for option, value in options.items()
            if saved.get(group, {}).get(option) != value
        ]
        raise UserError(
            f"{run.folder} holds a run with other options than the study has now ({', '.join(differing)}); name "
            "another folder with --output, or remove this one"
        )
    before = run.read_json("environment.json")
    for name, now in _launch(planned).items():
        if before is not None and before[name] != now:
            raise UserError(f"{run.folder} was made with {name} {before[name]}, not {now}; go on with {before[name]}")
    return (run.folder / "summary.json").is_file() or planned.path in _diverged([planned], folder)


def _launch(planned: PlannedRun) -> dict[str, str]:
    """How a run would be launched now, as far as its result depends on it."""
    precision = planned.config.train.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return {"processes": os.environ.get("WORLD_SIZE", "1"), "mixed precision": precision}


def _diverged(runs: Sequence[PlannedRun], folder: Path) -> dict[str, str]:
    """What was said about the runs that diverged with the options that they have now, by their folder."""
    noted = Run(folder).read_json(_DIVERGED) or {}
    return {
        run.path: noted[run.path]["error"]
        for run in runs
        if run.path in noted and noted[run.path]["options"] == {**run.config.essence(), **_launch(run)}
    }


def _check_start(pending: Sequence[PlannedRun]) -> None:
    """Find before the first run what can be found: data that are not there, models that cannot be built, ..."""
    seen = set()
    for planned in pending:
        if (planned.setting, planned.variant) not in seen:
            seen.add((planned.setting, planned.variant))
            try:
                check_run(planned.config)
            except UserError as error:
                where = f"variant {planned.variant!r}" + (f" in {planned.setting!r}" if planned.setting else "")
                name, place = planned.config.source
                data = getattr(planned.config.data, name)
                is_missing = f"data.{place} must be given" in str(error) and data is not None
                hint = f"; give it as --root {data}=DIR" if is_missing else ""
                raise UserError(f"{where}: {error}{hint}") from error


def _run(planned: PlannedRun, folder: Path, command: str, console: Console, main_process: bool) -> None:
    run = Run(folder / planned.path)
    begun = run.checkpoint() is not None
    if not begun and run.config_path.exists() and main_process:
        # What a kill before the end of the first epoch leaves behind holds nothing.
        shutil.rmtree(run.folder, ignore_errors=True)
    try:
        train_run(planned.config, run.folder, command=None if begun else command, console=console)
    except DivergedError as error:
        console.print(f"this run is left out: {error}", soft_wrap=True)
        if main_process:
            noted = Run(folder).read_json(_DIVERGED) or {}
            noted[planned.path] = {"error": str(error), "options": {**planned.config.essence(), **_launch(planned)}}
            Run(folder).write_json(_DIVERGED, noted)
    except UserError as error:
        raise UserError(f"variant {planned.variant!r}: {error}") from error


def _write(study: Study, folder: Path, command: str) -> list[VariantResult]:
    diverged = _diverged(study.runs, folder)
    results = collect(study, folder, diverged)
    header, rows = table_rows(study, results)
    finished = [run for result in results for run in result.finished]
    text = (
        f"# {study.title}\n\n{len(finished)} of {len(study.runs)} runs finished; seeds "
        f"{', '.join(map(str, study.seeds))}. {RESULT_NOTE}\n\n{to_markdown(header, rows)}\nMade by `{command}`.\n"
    )
    content = {
        "study": study.name,
        "title": study.title,
        "command": command,
        "reference": study.reference,
        "metric": study.score.name,
        "seeds": list(study.seeds),
        "results": [result.to_dict() for result in results],
        "diverged": diverged,
    }
    write_atomically(folder / "results.md", lambda path: path.write_text(text))
    Run(folder).write_json("results.json", content)
    plot = results_figure(study, results) if finished else None
    if plot is not None:
        write_figure(folder / "results.png", plot)
    curves = curves_figure(study, results)
    first = {run.setting: run for run in reversed(study.runs)}
    write_page(
        folder / "report.html",
        "study.html.j2",
        study=study,
        note=RESULT_NOTE,
        header=header,
        rows=rows,
        results=results,
        finished=len(finished),
        diverged=diverged,
        command=command,
        plot=encode_figure(plot) if plot else "",
        curves=encode_figure(curves) if curves else "",
        configurations={
            setting: yaml.safe_dump(run.config.to_dict(), sort_keys=False) for setting, run in first.items()
        },
        environment=finished[0].summary["environment"] if finished else None,
    )
    return results

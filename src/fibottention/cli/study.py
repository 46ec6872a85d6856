"""``fibottention study``: many runs with one budget, side by side."""

import shlex
import sys
from pathlib import Path

from rich.table import Table

from fibottention.cli.options import CommandParser, is_main_process, make_console, stop_politely
from fibottention.errors import UserError
from fibottention.studies.plan import load_study, study_names
from fibottention.studies.results import table_rows
from fibottention.studies.runner import RESULT_NOTE, run_study

__all__ = ["run"]

_FILES_ONLY = ("best epoch", "parameters", "attention MACs")  # a terminal is too narrow for all columns


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention study",
        description="Train every variant of a study with every seed, on the same data and budget, and compare them. "
        "The same command again goes on where it was stopped.",
        epilog="Other options, such as --data.root DIR or --train.device cuda, hold for all runs; see fibottention "
        f"train --help. Studies that come with the package: {', '.join(study_names())}.",
    )
    parser.add_argument(
        "study", metavar="STUDY", nargs="?", help="a YAML file, or the name of a study that comes with the package"
    )
    parser.add_argument("--quick", action="store_true", help="the study's small version, for minutes on a CPU")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="seeds in the place of the study's own")
    parser.add_argument(
        "--root",
        nargs="+",
        default=[],
        metavar="DATA=DIR",
        help="folders of data by data.name (data.format of detectors, data.path of robots)",
    )
    parser.add_argument("--output", type=Path, help="folder of the study (default: runs/STUDY)")
    parser.add_argument("--list", action="store_true", help="list the runs, and train nothing")
    arguments, rest = parser.parse_known_args(words)
    if arguments.study is None:
        if rest:
            raise UserError(f"name the study before {rest[0]}; there are {', '.join(study_names())}")
        sys.stdout.write("studies that come with the package:\n" + "".join(f"  {name}\n" for name in study_names()))
        return 0
    roots = {}
    for word in arguments.root:
        data, equals, folder = word.partition("=")
        if not equals or not folder:
            raise UserError(f"--root must be DATA=DIR, such as cifar100=/data/cifar, got {word!r}")
        roots[data] = folder
    study = load_study(arguments.study, quick=arguments.quick, seeds=arguments.seeds, overrides=rest, roots=roots)
    if arguments.list:
        for planned in study.runs:
            sys.stdout.write(f"{planned.path}\n")
        return 0
    folder = arguments.output or Path("runs") / study.name
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output: {folder} is a file, not a folder")
    stop_politely()
    console = make_console()
    command = shlex.join(["fibottention", "study", *words])
    try:
        results = run_study(study, folder, command=command, console=console, main_process=is_main_process())
    except KeyboardInterrupt:
        if is_main_process():
            sys.stderr.write(f"fibottention: stopped; go on with the same command: {command}\n")
        return 130
    if not is_main_process():
        return 0
    header, rows = table_rows(study, results)
    table = Table(title=study.title)
    shown = [i for i, name in enumerate(header) if not name.startswith(_FILES_ONLY)]
    for i in shown:
        is_name = header[i] in ("setting", "variant")
        table.add_column(header[i], justify="left" if is_name else "right", overflow="fold" if is_name else "ellipsis")
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    console.print(table)
    console.print(RESULT_NOTE)
    console.print(f"report: {folder / 'report.html'}; table: {folder / 'results.md'}", soft_wrap=True)
    return 0

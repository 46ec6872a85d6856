"""``fibottention report``: one HTML page about one or several runs."""

from pathlib import Path

from fibottention.analysis.report import write_report
from fibottention.cli.options import CommandParser, check_output, make_console

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(prog="fibottention report", description="Write one HTML page about runs, side by side.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, help="HTML file (default: report.html in the first run's folder)")
    arguments = parser.parse_args(words)
    if arguments.output is not None:
        check_output(arguments.output)
    written = write_report(arguments.runs, arguments.output or arguments.runs[0] / "report.html")
    make_console().print(f"report: {written}", soft_wrap=True)
    return 0

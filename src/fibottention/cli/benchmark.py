"""``fibottention benchmark``: time sparse attention against its rivals on this machine."""

import dataclasses
import json
import shlex
from pathlib import Path

import torch

from fibottention.analysis.benchmark import (
    RIVALS,
    TRAINING_CASES,
    Case,
    Measurement,
    TrainingCase,
    attention_markdown,
    default_batch,
    machine,
    measure_attention,
    measure_training,
    plot_attention,
    training_markdown,
)
from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.training.run import write_atomically

__all__ = ["run"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def run(words: list[str], command: str | None = None) -> int:
    """Run the command; returns the exit code.

    Args:
        words: Its arguments.
        command: What the written tables name as their source, if not this command.
    """
    parser = CommandParser(
        prog="fibottention benchmark",
        description="Time sparse attention against dense attention and other rivals, in turn in one process. "
        "Writes attention.md, attention.json and attention.png, and training.md and training.json.",
    )
    every = torch.get_num_threads()
    parser.add_argument("--tokens", type=int, nargs="+", default=[197, 1025, 4097], help="lengths, CLS included")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}), help=f"default 1 and {every}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each rival in each setting (default 4)")
    parser.add_argument("--without", nargs="*", default=[], choices=RIVALS, metavar="RIVAL", help="rivals to leave out")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("attention", "training"),
        default=["attention", "training"],
        help="the operator, whole training steps of ViT-S, or both (default)",
    )
    parser.add_argument("--output", type=Path, default=Path("benchmark"), help="folder (default benchmark)")
    arguments = parser.parse_args(words)
    if min(arguments.tokens) < 2 or min(arguments.threads) < 1 or arguments.seconds <= 0:
        raise UserError("--tokens must be at least 2, --threads at least 1 and --seconds above 0")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU on this machine")
    if arguments.output.exists() and not arguments.output.is_dir():
        raise UserError(f"--output: {arguments.output} is a file, not a folder")
    arguments.output.mkdir(parents=True, exist_ok=True)

    console = make_console()
    command = command or shlex.join(["fibottention", "benchmark", *words])
    threads = arguments.threads if arguments.device == "cpu" else [1]
    wanted = "attention" in arguments.parts
    cases = [
        Case(tokens, default_batch(tokens), _DTYPES[dtype], count, backward, arguments.device)
        for dtype in arguments.dtypes
        for count in threads
        for tokens in sorted(arguments.tokens)
        for backward in (False, True)
        if wanted
    ]
    results: dict[Case, list[Measurement]] = {}
    steps: dict[TrainingCase, dict[str, float]] = {}
    with console.status("") as status:
        for number, case in enumerate(cases, 1):
            what = f"{number}/{len(cases)}: {case.tokens:,} tokens, {str(case.dtype)[6:]}, {case.threads} threads"
            results[case] = measure_attention(
                case,
                seconds=arguments.seconds,
                without=tuple(arguments.without),
                progress=lambda name, what=what: status.update(f"{what}: {name}"),
            )
            console.print(
                f"{what}, {'both passes' if case.backward else 'forward'}: {_one_line(results[case])}", soft_wrap=True
            )
            _write_attention(arguments.output, results, command)
        for case in TRAINING_CASES if "training" in arguments.parts else ():
            steps[case] = measure_training(
                case,
                arguments.device,
                progress=lambda name, case=case: status.update(f"training step, {case.what}: {name}"),
            )
            ms = steps[case]
            times = f"dense {ms['dense']:.0f} ms, fibottention {ms['fibottention']:.0f} ms"
            console.print(f"training step, {case.what}: {times}", soft_wrap=True)
            _write_training(arguments.output, steps, command, arguments.device)
    console.print(f"written to {arguments.output}", soft_wrap=True)
    return 0


def _one_line(measurements: list[Measurement]) -> str:
    times = {m.rival: m.milliseconds for m in measurements}
    dense, ours = times.get("dense SDPA"), times.get("cpu", times.get("triton"))
    if ours is None:
        return "; ".join(f"{m.rival}: {m.note}" for m in measurements if m.note)
    speed_up = f", dense SDPA {dense:.3g} ms, {dense / ours:.1f}x" if dense else ""
    return f"{ours:.3g} ms{speed_up}"


def _write_attention(folder: Path, results: dict[Case, list[Measurement]], command: str) -> None:
    """Write what there is so far, so that a run that is stopped keeps what it measured."""
    record = {
        "command": command,
        "machine": machine(next(iter(results)).device),
        "cases": [
            dataclasses.asdict(case) | {"dtype": str(case.dtype)[6:], "rivals": [dataclasses.asdict(m) for m in found]}
            for case, found in results.items()
        ],
    }
    text = attention_markdown(results, command)
    write_atomically(folder / "attention.md", lambda path: path.write_text(text))
    write_atomically(folder / "attention.json", lambda path: path.write_text(json.dumps(record, indent=1) + "\n"))
    write_atomically(folder / "attention.png", lambda path: plot_attention(results, path))


def _write_training(folder: Path, steps: dict[TrainingCase, dict[str, float]], command: str, device: str) -> None:
    record = {
        "command": command,
        "machine": machine(device),
        "cases": [dataclasses.asdict(case) | {"milliseconds": ms} for case, ms in steps.items()],
    }
    text = training_markdown(steps, command, device)
    write_atomically(folder / "training.md", lambda path: path.write_text(text))
    write_atomically(folder / "training.json", lambda path: path.write_text(json.dumps(record, indent=1) + "\n"))

"""Trains a ViT-S/16 at 224 pixels on one GPU, dense and sparse, with one budget, in under ten minutes.

    python benchmarks/gpu_study.py [--root DIR]

Runs the study `gpu_vit_small` run by run, and begins no run that would not end in time, so a cut-off keeps what is
done. Writes benchmarks/results/gpu_study.md and .png anew after each run. With `--root`, a folder with the whole
Fashion-MNIST, trains on its 60,000 images. With `--tiny` it trains tiny models on the CPU, to test the script.
"""

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from fibottention.cli.options import make_console
from fibottention.studies.plan import load_study
from fibottention.studies.runner import run_study

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
parser.add_argument("--runs", type=Path, default=Path("runs/gpu_study"), help="folder of the runs")
parser.add_argument("--root", type=Path, help="folder with the whole Fashion-MNIST")
parser.add_argument("--seconds", type=float, default=540, help="time for all runs")
parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")


def main() -> int:
    """Run the script; returns the exit code."""
    arguments = parser.parse_args()
    start = time.monotonic()
    overrides = [f"--train.device={'cpu' if arguments.tiny else 'cuda'}"]
    if arguments.root is not None:
        overrides += ["--data.name=fashion-mnist", f"--data.root={arguments.root}", "--train.epochs=2"]
    study = load_study("gpu_vit_small", quick=arguments.tiny, overrides=overrides)
    console = make_console()
    longest = 0.0
    for number in range(1, len(study.runs) + 1):
        begun = time.monotonic()
        if number > 1 and begun - start + 1.2 * longest > arguments.seconds:
            console.print(f"{number - 1} of {len(study.runs)} runs fitted into {arguments.seconds:.0f} s")
            break
        so_far = replace(study, runs=study.runs[:number])
        run_study(so_far, arguments.runs, command="python benchmarks/gpu_study.py", console=console)
        longest = max(longest, time.monotonic() - begun)
        arguments.output.mkdir(parents=True, exist_ok=True)
        for kind in ("md", "png"):
            shutil.copyfile(arguments.runs / f"results.{kind}", arguments.output / f"gpu_study.{kind}")
    console.print((arguments.output / "gpu_study.md").read_text(), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Sparse attention against its rivals; writes benchmarks/results/attention.{md,json,png} and training.{md,json}.

python benchmarks/attention.py [options of `fibottention benchmark`, but for --output]
"""

import shlex
import sys
from pathlib import Path

from fibottention.cli.benchmark import run

if __name__ == "__main__":
    results = Path(__file__).parent / "results"
    command = shlex.join(["python", "benchmarks/attention.py", *sys.argv[1:]])
    sys.exit(run([*sys.argv[1:], "--output", str(results)], command))

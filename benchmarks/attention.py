"""Sparse attention against its rivals; writes benchmarks/results/attention.{md,json,png}.

python benchmarks/attention.py [options of `fibottention benchmark`]
"""

import sys
from pathlib import Path

from fibottention.cli.benchmark import run

if __name__ == "__main__":
    results = Path(__file__).parent / "results"
    sys.exit(run([*sys.argv[1:], "--output", str(results)], command="python benchmarks/attention.py"))

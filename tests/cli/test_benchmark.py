"""``fibottention benchmark`` and the GPU check script, as a user runs them, at tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from fibottention import sparse_attention
from fibottention.analysis import benchmark
from fibottention.cli import benchmark as command
from fibottention.cli import main
from fibottention.patterns import Pattern, wythoff

ROOT = Path(__file__).parents[2]
QUICK = ["--tokens", "26", "50", "--seconds", "0.01", "--threads", "1", "--dtypes", "float32", "--parts", "attention"]


def test_writes_a_table_a_picture_and_json(tmp_path):
    words = ["benchmark", *QUICK, "--without", "FlexAttention", "--output", "out"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "fibottention.cli", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out" / "attention.md").read_text()
    assert "`fibottention benchmark --tokens 26 50" in table
    record = json.loads((tmp_path / "out" / "attention.json").read_text())
    assert [(c["tokens"], c["batch"], c["backward"]) for c in record["cases"]] == [
        (26, 121, False),
        (26, 121, True),
        (50, 63, False),
        (50, 63, True),
    ]
    for case in record["cases"]:
        times = {rival["rival"]: rival["milliseconds"] for rival in case["rivals"]}
        assert set(times) == {
            "stream", "dense SDPA", "cpu", "cpu, timm views", "gather", "SDPA, boolean mask", "SDPA, float mask",
            "released code",
        }  # fmt: skip
        assert all(ms > 0 for ms in times.values())
        assert f"| {case['tokens']} | {case['batch']} |" in table
    assert Image.open(tmp_path / "out" / "attention.png").width > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1"], "--tokens must be at least 2"),
        (["--dtypes", "int8"], "--dtypes: invalid choice: 'int8'"),
        (["--without", "flexattention"], "--without: invalid choice: 'flexattention'"),
        (["--device", "cuda"], "--device cuda: PyTorch sees no GPU on this machine"),
        (["--output", "file"], "--output: file is a file, not a folder"),
    ],
)
def test_bad_options(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("file").touch()
    assert main(["benchmark", *words]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_training_steps(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "TRAINING_CASES", (benchmark.TrainingCase("32 pixels", 32, 2),))
    assert main(["benchmark", "--parts", "training", "--output", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["training.json", "training.md"]
    assert "| 32 pixels | 5 | 2 |" in (tmp_path / "training.md").read_text()


def test_a_rival_that_fails_does_not_stop_the_others(monkeypatch):
    def broken(pattern, device):
        def attend(q, k, v):
            raise RuntimeError("no compiler\nand more")

        return attend

    monkeypatch.setattr(benchmark, "_flex", broken)
    results = {m.rival: m for m in benchmark.measure_attention(benchmark.Case(20, 2), seconds=0.001)}
    assert results["FlexAttention"].milliseconds is None
    assert results["FlexAttention"].note == "no compiler"
    assert results["cpu"].milliseconds > 0


def test_all_rivals_but_the_dense_compute_the_same():
    case = benchmark.Case(40, 2)
    q, k, v = (torch.randn(2, 12, 40, 64) for _ in range(3))
    expected = sparse_attention(q, k, v, case.pattern, backend="reference")
    rivals = benchmark._rivals(case)
    for name in set(rivals) - {"dense SDPA", "FlexAttention", "released code"}:
        torch.testing.assert_close(rivals[name][0](q, k, v), expected)
    zero = sparse_attention(q, k, v, case.pattern, fill="zero", backend="reference")
    torch.testing.assert_close(rivals["released code"][0](q, k, v), zero)


@pytest.mark.parametrize("tokens", [300, 257, 128])
def test_the_block_mask_of_flex_attention_covers_the_pattern(tokens):
    for pattern in (
        wythoff(3, tokens - 1, prefix_tokens=1),
        Pattern.from_offsets([[0, 130], [-7]], tokens, allow_empty=True),
    ):
        mask = benchmark.flex_block_mask(pattern, "cpu")
        blocks = mask.to_dense()[0].bool().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :tokens, :tokens]
        kept = pattern.mask()
        assert (blocks | ~kept).all()
        head, query, key = torch.meshgrid(*(torch.arange(n) for n in kept.shape), indexing="ij")
        assert (mask.mask_mod(torch.tensor(0), head, query, key) == kept).all()


@pytest.mark.slow
def test_gpu_check_runs_tiny_on_the_cpu(tmp_path):
    script = ROOT / "benchmarks" / "gpu_check.py"
    done = subprocess.run(
        [sys.executable, str(script), "--tiny", "--output", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu_check.md").read_text()
    assert "0 failed checks" in text
    assert text.count("| ok |") == 14
    assert "FAILED" not in text
    assert "bit for bit equal: yes" in text
    if not torch.cuda.is_available():
        done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 2
        assert "PyTorch sees no GPU" in done.stderr


def test_gpu_study_stops_in_time_and_keeps_what_is_done(tmp_path):
    words = [sys.executable, ROOT / "benchmarks" / "gpu_study.py", "--tiny", "--seconds=1"]
    words += [f"--output={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "1 of 8 runs fitted into 1 s" in result.stdout
    text = (tmp_path / "results" / "gpu_study.md").read_text()
    assert "1 of 1 runs finished" in text
    assert "| dense | 1 |" in text
    assert (tmp_path / "results" / "gpu_study.png").read_bytes().startswith(b"\x89PNG")

"""``fibottention cost``, and the costs by number of tokens."""

import json

import pytest

from fibottention import BigBird, Dense, Fibottention, TopK
from fibottention.analysis.scaling import attention_scaling, draw_scaling
from fibottention.cli import main


def test_costs_are_those_of_the_paper():
    first, last = attention_scaling(Fibottention(), (196, 65536))
    assert 12 * first.macs == pytest.approx(0.0214e9, rel=5e-3)  # facts on Fibottention, section 4
    assert 12 * first.dense_macs == pytest.approx(0.715e9, rel=1e-3)
    assert last.dense_macs == 2 * 12 * 65537**2 * 64
    assert last.macs < last.dense_macs / 1000
    assert first.forward_ms is None


def test_what_would_be_too_large_is_left_out():
    said = []
    costs = attention_scaling(BigBird(random_keys=40), (4096, 65536), skipped=said.append)
    assert [cost.tokens for cost in costs] == [4096]
    assert said == ["bigbird at 65,536 tokens is left out: its list of pairs could be too large"]
    costs = attention_scaling(Dense(), (65536,), measure=True, skipped=said.append)
    assert costs[0].both_ms is None
    assert "dense at 65,536 tokens is not timed: 6.6e+12 multiply-accumulates" in said


def test_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["cost", "fibottention:w_max=20", "topk", "dense", "--tokens", "64", "256", "--heads", "3", "--measure"]
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content) == ["fibottention:w_max=20", "topk", "dense"]
    for costs in content.values():
        assert [cost["tokens"] for cost in costs] == [64, 256]
        assert all(cost["forward_ms"] > 0 and cost["both_ms"] > 0 for cost in costs)
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert main(["cost", "longformer", "--tokens", "196"]) == 0
    assert "100.000%" not in capsys.readouterr().out


def test_picture():
    costs = {"a": attention_scaling(Fibottention(), (64, 256)), "b": attention_scaling(TopK(), (64, 256))}
    (axis,) = draw_scaling(costs).axes
    assert [list(line.get_ydata()) for line in axis.lines] == [[cost.macs for cost in c] for c in costs.values()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fibotention"], "did you mean 'fibottention'"),
        (["longformer:windw=3"], "has no option 'windw'; did you mean 'window'"),
        (["longformer:3"], "options are written option=value, got '3'"),
        (["longformer", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["longformer", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["neighborhood", "--tokens", "50"], "neighborhood: grid_size must be given for 50 tokens"),
        (["longformer", "--output", "nowhere/cost.png"], "--output: the folder nowhere does not exist"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["cost", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

import json

import pytest
import torch
from safetensors.torch import save_file

from fibottention.errors import UserError
from fibottention.training.run import Run, load_weights, write_atomically


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, lambda p: p.write_text("old"))

    def fail(p):
        p.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)

    def fill_the_disk(p):
        p.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"file\.txt cannot be written: No space left on device"):
        write_atomically(path, fill_the_disk)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_checkpoints_replace_each_other_and_ignore_half_written_ones(tmp_path):
    run = Run(tmp_path / "run")
    run.create({"task": "classification"})
    assert run.checkpoint() is None
    weights = {"w": torch.arange(6.0).view(2, 3).t()}
    run.save_checkpoint(1, weights, {"epoch": 1})
    run.save_checkpoint(2, weights, {"epoch": 2})
    half = run.folder / "checkpoints" / ".epoch_0003.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert run.checkpoint().name == "epoch_0002"
    assert torch.equal(load_weights(run.checkpoint() / "model.safetensors")["w"], weights["w"])
    run.save_checkpoint(3, weights, {"epoch": 3})
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["epoch_0003"]


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    run = Run(tmp_path / "run")
    run.create({"task": "classification"})
    weights = {"w": torch.ones(2)}
    run.save_checkpoint(1, weights, {})
    for broken, error in (
        ("save_file", SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
        ("torch.save", RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file")),
    ):

        def fail(*args, error=error):
            raise error

        monkeypatch.setattr(f"fibottention.training.run.{broken}", fail)
        with pytest.raises(UserError, match="epoch_0002 cannot be written"):
            run.save_checkpoint(2, weights, {})
        monkeypatch.undo()
        assert [p.name for p in (run.folder / "checkpoints").iterdir()] == ["epoch_0001"]
    run.remove_if_unfinished()
    assert run.folder.exists()


def test_records_and_json(tmp_path):
    run = Run(tmp_path)
    run.write_metrics([{"epoch": 1, "x": 0.5}, {"epoch": 2, "x": 0.25}])
    assert [r["epoch"] for r in run.metrics()] == [1, 2]
    run.write_json("a.json", {"b": [1, 2]})
    assert run.read_json("a.json") == {"b": [1, 2]}
    assert run.read_json("none.json") is None
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2]}


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no config\.yaml"):
        Run.open(tmp_path)
    (tmp_path / "other").write_text("x")
    with pytest.raises(UserError, match="must be a new or empty folder"):
        Run(tmp_path).create({})
    run = Run(tmp_path / "run")
    run.create({"a": 1})
    with pytest.raises(UserError, match="already holds a run; continue it with --resume"):
        run.create({"a": 1})
    assert run.read_yaml() == {"a": 1}
    run.config_path.write_text("a: [")
    with pytest.raises(UserError, match="is not valid YAML"):
        run.read_yaml()
    run.config_path.write_text("text")
    with pytest.raises(UserError, match="holds no configuration"):
        run.read_yaml()
    with pytest.raises(UserError, match="has no weights yet"):
        run.weights()


def test_weights_of_many_kinds(tmp_path):
    weights = {"a": torch.ones(2)}
    save_file(weights, tmp_path / "w.safetensors")
    for name, content in (
        ("plain.pth", weights),
        ("nested.pth", {"state_dict": weights, "epoch": 3}),
        ("mae.pth", {"model": weights}),
    ):
        torch.save(content, tmp_path / name)
    for name in ("w.safetensors", "plain.pth", "nested.pth", "mae.pth"):
        assert torch.equal(load_weights(tmp_path / name)["a"], weights["a"])
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    (tmp_path / "bad.pth").write_bytes(b"nonsense")
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("bad.safetensors", "bad.pth", "empty.pth"):
        with pytest.raises(UserError, match="is not a readable file of weights"):
            load_weights(tmp_path / name)
    with pytest.raises(UserError, match="holds no dictionary of tensors"):
        load_weights(tmp_path / "list.pth")
    with pytest.raises(UserError, match="is not a file of weights"):
        load_weights(tmp_path / "missing.pth")


def test_weights_can_be_read_by_whom_other_files_can(tmp_path):
    run = Run(tmp_path)
    run.write_yaml({})
    run.save_best({"a": torch.zeros(2)})
    run.save_checkpoint(1, {"a": torch.zeros(2)}, {})
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) == 1

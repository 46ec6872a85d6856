import pytest

from fibottention.errors import UserError
from fibottention.tasks.video.lists import read_folder, read_list, write_list


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names(videos, folder):
    return [(path.relative_to(folder).as_posix(), label) for path, label in videos.samples]


@pytest.mark.parametrize("separator", [" ", ",", "\t", ", ", "   "])
def test_separators(tmp_path, separator):
    touch(tmp_path, "a/b.mp4", "c.avi")
    (tmp_path / "train.csv").write_text(f"a/b.mp4{separator}2\n\nc.avi{separator}0\n")
    videos = read_list(tmp_path / "train.csv")
    assert names(videos, tmp_path) == [("a/b.mp4", 2), ("c.avi", 0)]
    assert videos.classes == ("0", "1", "2")


@pytest.mark.parametrize("separator", [" ", ",", "\t"])
@pytest.mark.parametrize("name", ["my clip.mp4", "one, two.mp4", "a 3.mp4", "b,4.mp4", "1 2", "5,6"])
def test_names_with_spaces_commas_and_numbers(tmp_path, separator, name):
    touch(tmp_path, name, "plain.mp4")
    (tmp_path / "list.csv").write_text(f"{name}{separator}1\nplain.mp4{separator}0\n")
    assert names(read_list(tmp_path / "list.csv"), tmp_path) == [(name, 1), ("plain.mp4", 0)]


def test_quoted_names(tmp_path):
    touch(tmp_path, "a, b.mp4")
    (tmp_path / "list.csv").write_text('"a, b.mp4",3\n')
    assert names(read_list(tmp_path / "list.csv"), tmp_path) == [("a, b.mp4", 3)]


def test_paths_begin_at_the_root_or_at_the_list(tmp_path):
    touch(tmp_path, "videos/a.mp4", "lists/b.mp4")
    (tmp_path / "lists/train.csv").write_text(f"a.mp4 0\nb.mp4 1\n{tmp_path}/videos/a.mp4 1\n")
    videos = read_list(tmp_path / "lists/train.csv", tmp_path / "videos")
    assert names(videos, tmp_path) == [("videos/a.mp4", 0), ("lists/b.mp4", 1), ("videos/a.mp4", 1)]


def test_lists_from_windows(tmp_path):
    touch(tmp_path, "ä.mp4", "b.mp4")
    (tmp_path / "train.csv").write_bytes("\ufeffä.mp4 0\r\nb.mp4 1\r\n".encode())
    (tmp_path / "classes.txt").write_bytes("\ufeffgehen\r\nlaufen\r\n".encode())
    videos = read_list(tmp_path / "train.csv")
    assert names(videos, tmp_path) == [("ä.mp4", 0), ("b.mp4", 1)]
    assert videos.classes == ("gehen", "laufen")


def test_names_that_no_file_can_have(tmp_path):
    (tmp_path / "train.csv").write_text(f"{'x' * 5000} 0\n~nobody/a.mp4 1\na\u2028b.mp4 0\n")
    assert [label for _, label in read_list(tmp_path / "train.csv").samples] == [0, 1, 0]


def test_classes_by_name(tmp_path):
    (tmp_path / "classes.txt").write_text("walk\nrun\n\njump\n")
    (tmp_path / "train.csv").write_text("a.mp4 0\n")
    assert read_list(tmp_path / "train.csv").classes == ("walk", "run", "jump")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n  \n", "is empty"),
        ("a.mp4\n", "line 1: each line must be a path and a label from 0, got 'a.mp4'"),
        ("a.mp4 0\nb.mp4 1\nc.mp4 walk\n", "line 3: each line must be a path and a label from 0, got 'c.mp4 walk'"),
        ("a.mp4 -1\n", "got 'a.mp4 -1'"),
        ("a.mp4 99999999\n", "got 'a.mp4 99999999'"),
        ("a.mp4 0\nb.mp4 1.5\n", "line 2"),
    ],
)
def test_bad_lists(tmp_path, text, message):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_list(tmp_path / "train.csv")


def test_binary_and_missing_lists(tmp_path):
    (tmp_path / "train.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read: not text"):
        read_list(tmp_path / "train.csv")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_list(tmp_path / "other.csv")


def test_labels_without_a_name(tmp_path):
    (tmp_path / "classes.txt").write_text("walk\nrun\n")
    (tmp_path / "train.csv").write_text("a.mp4 2\n")
    with pytest.raises(UserError, match="names 2 classes, but there is a label 2"):
        read_list(tmp_path / "train.csv")
    (tmp_path / "classes.txt").write_text("walk\nrun\nwalk\n")
    with pytest.raises(UserError, match="the same name twice: walk"):
        read_list(tmp_path / "train.csv")


def test_folders(tmp_path):
    touch(tmp_path, "walk/a.mp4", "walk/deep/b.MOV", "run/c.avi", "run/notes.txt", ".cache/x.mp4")
    videos = read_folder(tmp_path)
    assert videos.classes == ("run", "walk")
    assert names(videos, tmp_path) == [("run/c.avi", 0), ("walk/a.mp4", 1), ("walk/deep/b.MOV", 1)]
    # Labels are those of training, also where an action is missing.
    touch(tmp_path / "val", "walk/a.mp4")
    assert names(read_folder(tmp_path / "val", ("jump", "run", "walk")), tmp_path) == [("val/walk/a.mp4", 2)]


def test_bad_folders(tmp_path):
    with pytest.raises(UserError, match="has no folders"):
        read_folder(tmp_path)
    touch(tmp_path, "walk/a.txt")
    with pytest.raises(UserError, match="walk holds no videos"):
        read_folder(tmp_path)
    touch(tmp_path, "walk/a.mp4")
    with pytest.raises(UserError, match="has the action walk, which the training videos do not have"):
        read_folder(tmp_path, ("run",))


@pytest.mark.parametrize("name", ["a.mp4", "a b.mp4", "a,1.mp4", 'q"uote.mp4'])
def test_written_lists_are_read_back(tmp_path, name):
    touch(tmp_path, name, "other.mp4")
    write_list([(name, 1), ("other.mp4", 0)], tmp_path / "list.csv")
    assert names(read_list(tmp_path / "list.csv"), tmp_path) == [(name, 1), ("other.mp4", 0)]

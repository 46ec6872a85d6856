"""``fibottention video split``: lists of videos for training, validation and test."""

from pathlib import Path

from rich.table import Table

from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.video.lists import find_videos, read_folder, read_names, write_list
from fibottention.tasks.video.protocols import (
    data_set_names,
    protocol_names,
    split_random,
    split_videos,
    take_validation,
)
from fibottention.training.run import write_atomically

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    protocols = "; ".join(f"{name}: {', '.join(protocol_names(name))}" for name in data_set_names())
    parser = CommandParser(
        prog="fibottention video split",
        description="Write train.csv, val.csv, test.csv and classes.txt for a folder of videos. What a video shows is "
        "read from its file's name for the data sets with published protocols, and from its folder's name for a "
        f"random split. Protocols: {protocols}; any folder with one folder of videos per action: random.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder with the videos, at any depth")
    parser.add_argument("--dataset", help=f"{', '.join(data_set_names())}; not for --protocol random")
    parser.add_argument("--protocol", required=True, help="cross-subject, cross-view, ... or random")
    parser.add_argument("--output", type=Path, help="folder for the lists (default: FOLDER)")
    parser.add_argument(
        "--val-share",
        type=float,
        default=0.05,
        help="share of the training videos that is kept for validation, where the protocol has none (default 0.05); "
        "with 0 there is no val.csv, and training validates on test.csv",
    )
    parser.add_argument("--test-share", type=float, default=0.2, help="share to test on, for random (default 0.2)")
    parser.add_argument("--test-subjects", type=int, nargs="+", help="subjects to test on, for nucla's cross-subject")
    parser.add_argument("--actions", type=Path, help="file with the names of the actions to keep, one a line")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is chosen at random (default 0)")
    arguments = parser.parse_args(words)
    folder, output = arguments.folder, arguments.output or arguments.folder
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output: {output} is a file, not a folder")
    for name in ("val_share", "test_share"):
        value = getattr(arguments, name)
        if not 0 <= value < 1 or (name == "test_share" and not value):
            raise UserError(f"--{name.replace('_', '-')} must be at least 0 and below 1, got {value}")
    actions = None if arguments.actions is None else read_names(arguments.actions)
    if arguments.protocol == "random":
        if arguments.dataset is not None or arguments.test_subjects is not None:
            raise UserError("--dataset and --test-subjects have no meaning for --protocol random")
        videos = read_folder(folder, keep=actions)
        split = split_random(videos.samples, videos.classes, arguments.test_share, arguments.seed)
    else:
        if arguments.dataset is None:
            raise UserError(
                f"--dataset must be given for --protocol {arguments.protocol}: {', '.join(data_set_names())}"
            )
        paths = find_videos(folder)
        if not paths:
            raise UserError(f"{folder} holds no videos")
        split = split_videos(
            paths,
            arguments.dataset,
            arguments.protocol,
            test_subjects=arguments.test_subjects,
            actions=actions,
        )
    if not split.val and arguments.val_share:
        split = take_validation(split, arguments.val_share, arguments.seed)
    console = make_console()
    table = Table(title=f"{arguments.dataset or folder}, {arguments.protocol}")
    for column in ("list", "videos", "classes"):
        table.add_column(column, justify="left" if column == "list" else "right")
    for name in ("train", "val", "test"):
        samples = getattr(split, name)
        path = output / f"{name}.csv"
        if not samples:
            path.unlink(missing_ok=True)  # of another split
            continue
        named = [(_name(file, folder, output), label) for file, label in samples]
        write_list(named, path)
        table.add_row(str(path), str(len(samples)), str(len({label for _, label in samples})))
    text = "".join(f"{name}\n" for name in split.classes)
    write_atomically(output / "classes.txt", lambda temporary: temporary.write_text(text, encoding="utf-8"))
    console.print(table)
    if split.left_out:
        shown = ", ".join(path.name for path in split.left_out[:3])
        console.print(f"{len(split.left_out)} videos were left out, such as {shown}", soft_wrap=True)
    return 0


def _name(file: Path, folder: Path, output: Path) -> str:
    """A video's path in a list: relative where the lists lie in the folder of the videos, else whole."""
    return file.relative_to(folder).as_posix() if output.resolve() == folder.resolve() else file.absolute().as_posix()

import numpy as np
import pytest
import torch

from fibottention.tasks.robot.environments import environment_spec
from fibottention.tasks.robot.store import EpisodeStore
from fibottention.tasks.robot.windows import WindowDataset, crop_images, window_steps
from tests.robots import tiny_config, write


def test_windows_of_a_short_episode_by_hand():
    """As Diffusion Policy's sampler with pad_before = 1 and pad_after = 1: from -1 to 6 - 4 + 1."""
    assert window_steps(6, horizon=4, observation_steps=2, action_steps=2).tolist() == [
        [0, 0, 1, 2],
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [2, 3, 4, 5],
        [3, 4, 5, 5],
    ]


def test_an_episode_shorter_than_the_horizon():
    steps = window_steps(3, horizon=16, observation_steps=2, action_steps=8)
    assert len(steps) == 1  # from -1
    assert steps[0].tolist() == [0, 0, 1] + [2] * 13


@pytest.mark.parametrize("length", [1, 2, 9, 16, 17, 40])
def test_every_step_is_executed_in_some_window(length):
    observation_steps, action_steps = 2, 8
    steps = window_steps(length, 16, observation_steps, action_steps)
    assert ((np.diff(steps, axis=1) == 0) | (np.diff(steps, axis=1) == 1)).all()
    assert (steps.min(), steps.max()) == (0, length - 1)
    executed = steps[:, observation_steps - 1 : observation_steps - 1 + action_steps]
    assert set(executed.flatten().tolist()) == set(range(length))
    assert steps[0, observation_steps - 1] == 0  # the first look is at the first step


def test_crops():
    images = np.arange(2 * 8 * 10 * 3).reshape(2, 8, 10, 3).astype(np.uint8)
    assert np.array_equal(crop_images(images, 4, None), images[:, 2:6, 3:7])
    assert np.array_equal(crop_images(images, 4, np.array([0.0, 0.999999])), images[:, 0:4, 6:10])
    assert crop_images(images, None, None) is images
    places = {
        tuple(np.argwhere(images[0, ..., 0] == crop_images(images, 4, p)[0, 0, 0, 0])[0])
        for p in np.random.default_rng(0).random((400, 2))
    }
    assert places == {(y, x) for y in range(5) for x in range(7)}  # every place can be chosen


@pytest.fixture
def store(tmp_path):
    episodes = write(tmp_path / "demos.zarr", "zarr", lengths=(20, 3, 31))
    columns = environment_spec("pusht").columns["zarr"]
    made = EpisodeStore.unpack(
        tmp_path / "demos.zarr",
        {"image": columns["image"]},
        {"agent_pos": columns["agent_pos"], "action": "action"},
        cache=tmp_path / "cache",
    )
    return made, episodes


def dataset(store, train, **changes):
    data = tiny_config(*(f"--data.{k}={v}" for k, v in {"observation_steps": 2, **changes}.items())).data
    return WindowDataset(store, [0, 2], data, ["image"], ["agent_pos"], train=train, seed=3)


def test_samples_hold_what_was_recorded(store):
    made, episodes = store
    windows = dataset(made, train=False)
    # From -1 to length - 16 + 7, both included.
    of_first, of_second = 20 - 16 + 7 + 2, 31 - 16 + 7 + 2
    assert len(windows) == of_first + of_second
    sample = windows[of_first + 3]
    first = windows.steps[of_first + 3] - made.starts[2]
    episode = episodes[2]
    assert first[1] == first[0] + 1
    assert np.array_equal(sample["agent_pos"], episode.observations["agent_pos"][first[:2]])
    assert np.array_equal(sample["action"], episode.actions[first])
    assert np.array_equal(sample["image"].permute(0, 2, 3, 1), episode.observations["image"][first[:2], 6:90, 6:90])
    assert sample["image"].dtype == torch.uint8
    assert sample["image"].shape == (2, 3, 84, 84)


def test_crops_depend_on_seed_epoch_and_index_only(store):
    one, other = dataset(store[0], train=True), dataset(store[0], train=True)
    other[5]
    assert torch.equal(one[7]["image"], other[7]["image"])
    other.epoch = 1
    assert not torch.equal(one[7]["image"], other[7]["image"])
    assert torch.equal(one[7]["action"], other[7]["action"])

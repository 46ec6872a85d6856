import numpy as np
import pytest

from fibottention.errors import UserError
from fibottention.tasks.robot.environments import environment_names, environment_spec, make_environment
from fibottention.tasks.robot.record import Episode, Recording, record, record_episode, replay

ALL = ["pusht", "lift", "can"]


def environment_or_skip(name):
    if name != "pusht":
        pytest.importorskip("robosuite")
    return make_environment(name)


def test_names():
    assert environment_names() == ALL
    with pytest.raises(UserError, match="no environment is named 'pushed'; did you mean 'pusht'"):
        environment_spec("pushed")


@pytest.mark.parametrize("name", ALL)
def test_a_seed_begins_the_same_episode(name):
    environment = environment_or_skip(name)
    spec = environment.spec

    def begin(seed):
        environment.reset(seed)
        for _ in range(2):
            environment.step(environment.hold())
        return environment.state(), environment.observe()

    (state, seen), (other, _), (again, seen_again) = begin(5), begin(6), begin(5)
    assert np.array_equal(state, again)
    assert not np.allclose(state, other)
    assert set(seen) == {*spec.cameras, *spec.states}
    for camera in spec.cameras:
        assert seen[camera].shape == (spec.image_size, spec.image_size, 3)
        assert seen[camera].dtype == np.uint8
        assert np.array_equal(seen[camera], seen_again[camera])
        assert seen[camera].std() > 5  # something is to be seen
    for name_, size in spec.states.items():
        assert seen[name_].shape == (size,)
        assert seen[name_].dtype == np.float32
    assert environment.hold().shape == (spec.action_dim,)


@pytest.mark.parametrize("name", ALL)
def test_the_expert_does_the_task_and_its_actions_do_it_again(name, tmp_path):
    environment = environment_or_skip(name)
    episode = record_episode(environment, 1)
    assert episode.success
    assert episode.rewards.max() == 1
    assert len(episode) < environment.spec.max_steps
    assert episode.states.shape[0] == len(episode) == len(episode.observations[environment.spec.cameras[0]])
    environment.reset(1)
    assert any(environment.step(action)[1] for action in episode.actions)
    episode.save(tmp_path / "episode.npz")
    loaded = Episode.load(tmp_path / "episode.npz")
    assert np.array_equal(loaded.actions, episode.actions)
    assert all(np.array_equal(loaded.observations[n], v) for n, v in episode.observations.items())
    assert (loaded.seed, loaded.success) == (1, True)


@pytest.mark.slow
def test_a_recording_goes_on_where_it_stopped(tmp_path):
    recording = Recording(tmp_path / "episodes", "pusht")
    files, failed = record(recording, 2, 0, 2)
    assert (len(files), failed) == (2, [])
    before = {file: file.stat().st_mtime_ns for file in files}
    played = []
    files, _ = record(Recording(tmp_path / "episodes", "pusht"), 3, 0, 2, played.append)
    assert [episode.seed for episode in played] == [2]
    assert {file: file.stat().st_mtime_ns for file in files[:2]} == before
    episodes = [Episode.load(file) for file in files]
    assert replay("pusht", [e.actions for e in episodes], [e.seed for e in episodes], 2) == [True] * 3
    # Other actions do not do it.
    assert replay("pusht", [episodes[0].actions[::-1]], [0], 1) == [False]
    with pytest.raises(UserError, match="holds a recording of pusht, not of lift"):
        Recording(tmp_path / "episodes", "lift")

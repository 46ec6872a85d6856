import numpy as np
import pytest
import torch

from fibottention.errors import UserError
from fibottention.tasks.robot.network import build_policy
from fibottention.tasks.robot.policy import Policy
from tests.robots import PUSHT, tiny_config, tiny_policy


def seen(seed=0):
    generator = np.random.default_rng(seed)
    return {
        "image": generator.integers(0, 256, (96, 96, 3), dtype=np.uint8),
        "agent_pos": generator.uniform(0, 512, 2).astype(np.float32),
    }


@pytest.fixture
def policy():
    return Policy(tiny_policy("--data.observation_steps=2"), sampler="ddim", steps=3)


def test_it_looks_again_when_its_actions_are_done(policy):
    calls = []
    policy.network.unet.register_forward_hook(lambda *_: calls.append(1))
    actions = [policy.act(seen(i)) for i in range(17)]
    assert len(calls) == 3 * 3  # after 0, 8 and 16 actions
    assert len(policy.latencies) == 3
    assert policy.latency() > 0
    assert all(action.shape == (2,) and action.dtype == np.float32 for action in actions)


def test_the_first_action_belongs_to_the_last_observation(policy):
    """Of the sequence, whose first action is that of the first of two observations, the second one is done first."""
    first = policy.act(seen(0))
    crop = {
        "image": torch.from_numpy(np.stack([seen(0)["image"][6:90, 6:90]] * 2)).permute(0, 3, 1, 2)[None],
        "agent_pos": torch.from_numpy(np.stack([seen(0)["agent_pos"]] * 2))[None],
    }
    sequence = policy.network.predict(crop, [torch.Generator().manual_seed(0)], sampler="ddim", steps=3)
    assert np.allclose(first, sequence[0, 1], atol=1e-2)
    assert np.allclose(policy.act(seen(1)), sequence[0, 2], atol=1e-2)
    assert not np.allclose(first, sequence[0, 0], atol=1e-1)


def test_episodes_repeat_with_their_seed(policy):
    def play(seed):
        policy.reset(seed)
        return np.stack([policy.act(seen(i)) for i in range(10)])

    one, other, again = play(0), play(1), play(0)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_memory_stays_bounded(policy):
    for i in range(40):
        policy.act(seen(i))
    assert len(policy._seen) == 2
    assert len(policy._planned) <= 8
    observation = seen(0)
    policy.act(observation)
    kept = policy._seen[-1]["image"].copy()
    observation["image"][:] = 0  # the robot's loop may use its buffer again
    assert np.array_equal(policy._seen[-1]["image"], kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent_pos": None}, "the observation lacks 'agent_pos'; it has image"),
        ({"agent_pos": np.zeros(3)}, r"agent_pos must have shape \(2,\), got \(3,\)"),
        ({"agent_pos": [1.0, np.nan]}, "agent_pos is not finite"),
        (
            {"image": np.zeros((3, 96, 96), np.uint8)},
            r"image must have shape \(96, 96, 3\) and dtype uint8, got \(3, 96",
        ),
        ({"image": np.zeros((96, 96, 3), np.float32)}, "got .* of float32"),
    ],
)
def test_bad_observations(policy, change, message):
    observation = {name: value for name, value in (seen() | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        policy.act(observation)


def test_bad_settings():
    network = tiny_policy()
    with pytest.raises(UserError, match=r"steps must be in 1 .. 100, the diffusion steps of training, got 101"):
        Policy(network, steps=101)
    with pytest.raises(UserError, match="sampler must be ddpm or ddim, got 'euler'"):
        Policy(network, sampler="euler")
    with pytest.raises(UserError, match="no normalisation statistics"):
        Policy(build_policy(tiny_config(), PUSHT)[0])

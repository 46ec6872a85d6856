import numpy as np
import pytest

from fibottention.tasks.robot.environments import environment_spec, make_environment
from fibottention.tasks.robot.policy import Policy
from fibottention.tasks.robot.rollout import (
    IdlePlanner,
    LearnedPlanner,
    RandomPlanner,
    Rollout,
    roll_out,
    summarize,
)
from tests.robots import tiny_policy

SPEC = environment_spec("pusht")


def play(planner, seeds, parallel=0, **options):
    options = {"observation_steps": 2, "max_steps": 20, **options}
    return roll_out("pusht", planner, seeds, parallel=parallel, **options)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Wilson's interval as tables of it say.
    [(0, 50, 0.0, 0.0713), (50, 50, 0.9287, 1.0), (25, 50, 0.3664, 0.6336), (1, 10, 0.0179, 0.4042)],
)
def test_the_interval_of_the_success_rate(successes, count, low, high):
    rollouts = [Rollout(i, score=0.5, success=i < successes, steps=10) for i in range(count)]
    summary = summarize(rollouts)
    assert summary.interval == pytest.approx((low, high), abs=5e-4)
    assert (summary.mean_score, summary.steps, summary.episodes) == (0.5, 10, count)


def test_the_score_is_the_largest_reward():
    planner = RandomPlanner(SPEC, 8)
    rollout = play(planner, [3])[0]
    environment = make_environment("pusht")
    environment.reset(3)
    planner.reset([3])
    rewards = []
    while len(rewards) < 20:
        for action in planner.plan({})[0]:
            if len(rewards) < 20:
                rewards.append(environment.step(action)[0])
    assert rollout.score == max(rewards)
    assert (rollout.steps, rollout.success, rollout.seed) == (20, False, 3)


def test_an_idle_robot_stays():
    class Watched(IdlePlanner):
        def plan(self, observations):
            self.places = observations["agent_pos"]
            return super().plan(observations)

    planner = Watched(8)
    play(planner, [0])
    environment = make_environment("pusht")
    environment.reset(0)
    assert np.abs(planner.places[0] - environment.observe()["agent_pos"]).max() < 1e-3


def test_playing_at_the_same_time_changes_nothing():
    policy = Policy(tiny_policy("--data.observation_steps=2"), sampler="ddim", steps=2)
    alone, together = (
        play(LearnedPlanner(policy), range(5), parallel=parallel, films=films) for parallel, films in ((0, 0), (2, 1))
    )
    assert [r.seed for r in together] == list(range(5))
    for one, other in zip(alone, together, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-5)
        assert one.steps == other.steps
    assert [len(r.frames) for r in together] == [21, 0, 0, 0, 0]
    assert together[0].frames[0].shape == (256, 256, 3)


def test_chunks_do_what_single_actions_do():
    """`Policy.act`, asked step by step, plays the same episode as a rollout."""
    policy = Policy(tiny_policy("--data.observation_steps=2"), sampler="ddpm", steps=2)
    rollout = play(LearnedPlanner(policy), [11])[0]
    environment = make_environment("pusht")
    environment.reset(11)
    policy.reset(seed=11)
    score = max(environment.step(policy.act(environment.observe()))[0] for _ in range(20))
    assert score == pytest.approx(rollout.score, abs=1e-6)


def test_only_what_is_seen_is_drawn(monkeypatch):
    from fibottention.tasks.robot.environments.pusht import PushT

    looks = []
    observe = PushT.observe
    monkeypatch.setattr(PushT, "observe", lambda self: looks.append(1) or observe(self))
    play(RandomPlanner(SPEC, 8), [0], max_steps=24)
    assert len(looks) == 1 + 3 * 2


def test_success_ends_an_episode():
    from fibottention.tasks.robot.environments import make_expert

    class Expert:
        def reset(self, seeds):
            self.environment = make_environment("pusht")
            self.environment.reset(seeds[0])
            self.expert = make_expert(self.environment, seeds[0])

        def plan(self, observations):
            actions = []
            for _ in range(8):
                actions.append(self.expert.act())
                self.environment.step(actions[-1])
            return np.stack(actions)[None]

    rollout = play(Expert(), [2], max_steps=300)[0]
    assert rollout.success
    assert rollout.score == 1
    assert rollout.steps < 300

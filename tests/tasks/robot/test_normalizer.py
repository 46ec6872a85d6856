import pytest
import torch

from fibottention.errors import UserError
from fibottention.tasks.robot.normalizer import Normalizer


def test_training_data_fill_minus_one_to_one_and_constant_numbers_stay_put():
    normalizer = Normalizer({"action": 4})
    # 0..10; -3..-1; always 5; moves less than 1e-4
    values = torch.tensor([[0.0, -3.0, 5.0, 1.0], [10.0, -1.0, 5.0, 1.00001], [5.0, -2.0, 5.0, 1.0]])
    normalizer.fit("action", values)
    scaled = normalizer.normalize("action", values)
    expected = torch.tensor([[-1.0, -1, 0, 0], [1.0, 1, 0, 0], [0.0, 0, 0, 0]])
    torch.testing.assert_close(scaled, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(normalizer.restore("action", scaled), values)


def test_fixed_numbers_are_left_as_they_are():
    normalizer = Normalizer({"action": 3})
    values = torch.tensor([[0.0, 0.3, 4.0], [2.0, -0.2, 6.0]])
    normalizer.fit("action", values, fixed=slice(1, 2))
    assert normalizer.normalize("action", values)[:, 1].tolist() == pytest.approx([0.3, -0.2])


def test_the_channels_of_images_get_mean_0_and_deviation_1():
    normalizer = Normalizer({"image": 3})
    images = torch.randint(0, 256, (6, 10, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[..., 2] = 255  # a channel that says nothing
    normalizer.fit_images("image", images)
    scaled = normalizer.normalize_images("image", images.permute(0, 3, 1, 2))
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.std((0, 2, 3), correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4, rtol=0)


def test_statistics_are_saved_with_the_weights():
    normalizer = Normalizer({"action": 1, "agent_pos": 2})
    normalizer.fit("action", torch.tensor([[1.0], [3.0]]))
    normalizer.fit("agent_pos", torch.rand(5, 2))
    other = Normalizer({"action": 1, "agent_pos": 2})
    other.load_state_dict(normalizer.state_dict())
    assert other.normalize("action", torch.tensor([2.0])).item() == 0
    assert len(normalizer.state_dict()) == 4


def test_without_statistics_it_says_so():
    normalizer = Normalizer({"action": 1, "agent_pos": 2})
    normalizer.fit("action", torch.tensor([[1.0], [3.0]]))
    with pytest.raises(UserError, match=r"no normalisation statistics \(agent_pos_scale\)"):
        normalizer.check()

import math

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from fibottention.errors import UserError
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.tasks.robot.network import build_policy
from fibottention.tasks.robot.shapes import PolicyShapes
from tests.robots import ARM, PUSHT, tiny_config, tiny_policy


def observation(shapes, count, steps, crop=84, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = {
        name: torch.randint(0, 256, (count, steps, 3, crop, crop), dtype=torch.uint8, generator=generator)
        for name in shapes.cameras
    }
    return images | {name: 512 * torch.rand(count, steps, n, generator=generator) for name, n in shapes.states.items()}


def generators(count):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def test_features_are_the_mean_of_the_patch_tokens_after_the_norm():
    policy = tiny_policy("--data.observation_steps=2", "--data.crop=80")
    seen = policy.scaled(observation(PUSHT, 3, 2, crop=80))
    encoder = policy.encoders["image"]
    tokens = encoder.forward_features(seen["image"].flatten(0, 1))
    assert tokens.shape == (6, 1 + 25, 16)  # the CLS token and 5 x 5 patches
    expected = torch.cat([tokens[:, 1:].mean(1).reshape(3, 2, 16), seen["agent_pos"]], dim=-1).flatten(1)
    torch.testing.assert_close(policy.encode(seen), expected)


def test_images_and_vectors_are_scaled():
    policy = tiny_policy()
    policy.normalizer.image_scale.copy_(torch.tensor([1 / 255, 2 / 255, 1.0]))
    policy.normalizer.image_offset.copy_(torch.tensor([0.0, -1.0, 0.0]))
    image = torch.tensor([0, 255], dtype=torch.uint8).expand(1, 1, 3, 1, 2)
    scaled = policy.scaled({"image": image, "agent_pos": torch.tensor([[0.0, 512.0]])})
    assert scaled["image"].flatten().tolist() == [0, 1, -1, 1, 0, 255]
    assert scaled["agent_pos"].tolist() == [[-1, 1]]


def test_every_camera_has_an_encoder_of_its_own_with_the_spec():
    policy, report = build_policy(tiny_config("--attention.name=longformer"), ARM)
    assert list(policy.encoders) == list(ARM.cameras)
    for encoder in policy.encoders.values():
        assert sum(isinstance(m, PatternAttention) for m in encoder.modules()) == 1
    first, second = (encoder.patch_embed.proj.weight for encoder in policy.encoders.values())
    assert not torch.equal(first, second)
    assert report is not None
    assert report.spec.name == "longformer"


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_sampling_is_the_schedulers_loop(sampler):
    """Against diffusers' schedulers, driven here step by step."""
    policy = tiny_policy(f"--diffusion.sampler={sampler}", "--diffusion.inference_steps=7")
    seen = observation(PUSHT, 2, 1)
    kind = DDPMScheduler if sampler == "ddpm" else DDIMScheduler
    options = {"num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "timestep_spacing": "trailing"}
    scheduler = kind(**options)
    scheduler.set_timesteps(7)
    sources = generators(2)
    actions = torch.stack([torch.randn(16, 2, generator=source) for source in sources])
    with torch.no_grad():
        condition = policy.encode(policy.scaled(seen))
        for step in scheduler.timesteps:
            noise = policy.unet(actions, torch.full((2,), int(step)), condition)[0]
            options = {"generator": sources} if sampler == "ddpm" else {}
            actions = scheduler.step(noise, step, actions, **options).prev_sample
    expected = (actions + 1) * 256
    torch.testing.assert_close(policy.predict(seen, generators(2)), expected)
    assert (expected[0] - expected[1]).abs().max() > 1


def test_one_step_of_ddim_by_hand():
    """From pure noise x at the last step: (x - sqrt(1 - a) * predicted) / sqrt(a), cut to -1 .. 1.

    The squared-cosine schedule (arXiv 2102.09672): a is the product of 1 - beta over the steps, where
    beta = min(1 - f(t + 1) / f(t), 0.999) and f(t) = cos((t / 100 + 0.008) / 1.008 * pi / 2)^2.
    """
    policy = tiny_policy()
    seen = observation(PUSHT, 2, 1)
    f = [math.cos((t / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(101)]
    a = math.prod(1 - min(1 - f[t + 1] / f[t], 0.999) for t in range(100))
    noise = torch.stack([torch.randn(16, 2, generator=source) for source in generators(2)])
    with torch.no_grad():
        predicted = policy.unet(noise, torch.tensor([99, 99]), policy.encode(policy.scaled(seen)))[0]
    expected = ((noise - (1 - a) ** 0.5 * predicted) / a**0.5).clamp(-1, 1)
    planned = policy.predict(seen, generators(2), sampler="ddim", steps=1)
    torch.testing.assert_close(planned, (expected + 1) * 256, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("steps", [1, 3, 16, 34, 51, 60, 99, 100])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_every_number_of_steps_begins_with_pure_noise(sampler, steps):
    policy = tiny_policy()
    seen_steps = []
    policy.unet.register_forward_hook(lambda module, inputs, output: seen_steps.append(int(inputs[1][0])))
    policy.predict(observation(PUSHT, 1, 1), generators(1), sampler=sampler, steps=steps)
    assert len(seen_steps) == steps
    assert seen_steps[0] == 99
    assert seen_steps == sorted(set(seen_steps), reverse=True)


def test_a_plan_depends_on_its_own_seed_only():
    policy = tiny_policy("--diffusion.inference_steps=5", "--diffusion.sampler=ddpm")
    seen = observation(PUSHT, 3, 1)
    together = policy.predict(seen, generators(3))
    alone = policy.predict({name: values[1:2] for name, values in seen.items()}, generators(3)[1:2])
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(together[0], policy.predict(seen, generators(4)[1:])[0])


def test_the_number_of_steps_is_chosen_at_run_time():
    policy = tiny_policy("--diffusion.sampler=ddpm")
    calls = []
    policy.unet.register_forward_hook(lambda *_: calls.append(1))
    policy.predict(observation(PUSHT, 1, 1), generators(1), sampler="ddim", steps=4)
    assert len(calls) == 4


def test_reconstruction_changes_training_but_not_the_action_path():
    """The same weights with and without the decoder give the same actions, bit for bit; the gradients differ."""
    with_decoder = tiny_policy()
    without = tiny_policy("--diffusion.reconstruction_weight=0", seed=1)
    own = without.state_dict()
    without.load_state_dict({name: value for name, value in with_decoder.state_dict().items() if name in own})
    decoder = [name for name in with_decoder.state_dict() if name not in own]
    assert decoder
    assert all(name.startswith("decoder.") for name in decoder)
    seen = observation(PUSHT, 2, 1)
    assert torch.equal(with_decoder.predict(seen, generators(2)), without.predict(seen, generators(2)))
    # In training its loss reaches the encoders.
    batch = seen | {"action": 512 * torch.rand(2, 16, 2)}
    with_decoder.train()
    noise, reconstruction = with_decoder(batch)
    parameter = with_decoder.encoders["image"].patch_embed.proj.weight
    of_noise, of_reconstruction = (
        torch.autograd.grad(x, parameter, retain_graph=True)[0] for x in (noise, reconstruction)
    )
    assert of_reconstruction.abs().max() > 0
    assert not torch.allclose(of_noise, of_noise + 0.1 * of_reconstruction)
    with_decoder.eval()
    # Even a decoder that is broken does not reach the actions.
    for parameter in with_decoder.decoder.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    assert torch.equal(with_decoder.predict(seen, generators(2)), without.predict(seen, generators(2)))


def test_the_losses_of_a_batch():
    policy = tiny_policy("--diffusion.samples_per_window=3")
    batch = observation(PUSHT, 4, 1) | {"action": 512 * torch.rand(4, 16, 2)}
    torch.manual_seed(0)
    noise, reconstruction = policy(batch)
    # By hand: the noise of three copies, and the rebuilt observation of the first one.
    torch.manual_seed(0)
    scaled = policy.scaled(batch)
    actions = (batch["action"] / 256 - 1).repeat(3, 1, 1)
    target = torch.randn_like(actions)
    steps = torch.randint(0, 100, (12,))
    scheduler = DDPMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    noisy = scheduler.add_noise(actions, target, steps)
    predicted, middle = policy.unet(noisy, steps, policy.encode(scaled).repeat(3, 1))
    torch.testing.assert_close(noise, (predicted - target).square().mean())
    rebuilt = policy.decoder(middle[:4])
    assert {name: values.shape for name, values in rebuilt.items()} == {
        "image": (4, 1, 3, 84, 84),
        "agent_pos": (4, 1, 2),
    }
    torch.testing.assert_close(reconstruction, sum((rebuilt[name] - scaled[name]).square().mean() for name in rebuilt))
    (noise + 0.1 * reconstruction).backward()
    unused = [name for name, p in policy.named_parameters() if p.grad is None]
    assert unused == []


def test_rotations_are_learned_as_six_numbers_and_come_back():
    policy = tiny_policy("--data.crop=76", shapes=ARM)
    assert policy.unet.final[-1].out_channels == 10
    for name, buffer in policy.normalizer.named_buffers():
        buffer.fill_(1.0 if name.endswith("_scale") else 0.0)
    actions = policy.predict(observation(ARM, 1, 1, crop=76), generators(1))
    assert actions.shape == (1, 16, 7)
    learned = ARM.learned_actions(actions)
    assert learned.shape == (1, 16, 10)
    torch.testing.assert_close(ARM.robot_actions(learned), actions, atol=1e-4, rtol=1e-4)


def test_sines_are_where_the_position_embedding_begins():
    plain, sines = tiny_policy("--model.position=random"), tiny_policy("--model.position=sincos")
    assert plain.encoders["image"].pos_embed.std() < 0.05
    embedding = sines.encoders["image"].pos_embed[0, 1:]
    assert sorted(embedding[0].tolist()) == pytest.approx([0] * 8 + [1] * 8)  # sines and cosines of the place (0, 0)
    assert embedding.requires_grad


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.name=vit_base_patch61_224"], "no model is named 'vit_base_patch61_224'; did you mean"),
        (["--model.name=resnet18", "--model.options={}"], "must be a vision transformer|cannot be made"),
        (["--model.options={num_heads: 5, embed_dim: 16}"], "cannot be made"),
        (["--model.options={num_classes: 5}"], "must not hold num_classes"),
        (["--data.crop=97"], "data.crop=97 is larger than the images of image, 96 x 96"),
        (["--attention.name=linformer", "--attention.rank=0"], "attention"),
    ],
)
def test_bad_options(words, message):
    with pytest.raises(UserError, match=message):
        build_policy(tiny_config(*words), PUSHT)


def test_the_report_counts_all_cameras():
    report = build_policy(tiny_config(), ARM)[1]
    assert report is not None
    assert [layer.path.split(".")[0] for layer in report.layers] == list(ARM.cameras)


def test_mixed_precision_trains_and_keeps_rotations_exact():
    policy = tiny_policy("--data.crop=76", shapes=ARM)
    batch = observation(ARM, 2, 1, crop=76) | {"action": torch.rand(2, 16, 7)}
    exact = ARM.learned_actions(batch["action"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ARM.learned_actions(batch["action"]), exact)
        noise, reconstruction = policy(batch)
    (noise + reconstruction).backward()
    assert torch.isfinite(noise)


def test_images_of_two_sizes_need_a_crop():
    shapes = PolicyShapes({"a": (96, 96), "b": (84, 84)}, {}, 2, None)
    with pytest.raises(UserError, match="must be square and of one size, or data.crop be given"):
        build_policy(tiny_config("--data.crop=null"), shapes)
    assert build_policy(tiny_config("--data.crop=80"), shapes)[0].shapes is shapes

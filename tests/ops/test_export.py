"""Export to ONNX, run by onnxruntime."""

import warnings

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from fibottention import Fibottention, Longformer, Twist, na1d, na2d, patterns, sparse_attention, sparsify
from fibottention.patterns import Pattern, wythoff
from tests.models.test_neighborhood_transformer import images, randomize, small


def run(module, *inputs):
    """What onnxruntime makes of a module after its export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), inputs, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [i.name for i in session.get_inputs()]
    return session.run(None, {n: x.detach().numpy() for n, x in zip(names, inputs, strict=True)})[0]


class Attend(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *inputs):
        return self.call(*inputs)


@pytest.mark.parametrize(
    "pattern",
    [wythoff(4, 30, prefix_tokens=1), patterns.bigbird(4, 30), patterns.dense(4, 12)],
    ids=["offsets", "rows", "dense"],
)
@pytest.mark.parametrize("transform", [None, Twist(0.3)])
def test_sparse_attention(pattern, transform):
    generator = torch.Generator().manual_seed(0)
    length = pattern.sequence_length
    q, k, v = (torch.randn(2, 4, length, 8, generator=generator) for _ in range(3))
    bias = torch.randn(1, 4, length, length, generator=generator)
    if transform is not None:
        transform.requires_grad_(False)

    def call(q, k, v, bias):
        return sparse_attention(q, k, v, pattern, bias=bias, transform=transform)

    np.testing.assert_allclose(run(Attend(call), q, k, v, bias), call(q, k, v, bias).numpy(), atol=1e-5)


def test_neighborhood_attention_with_bias_and_additional_keys():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, 8, 2, 4, generator=generator) for _ in range(3))
    rpb, more = torch.randn(2, 5, 5, generator=generator), torch.randn(2, 3, 2, 4, generator=generator)

    def call(q, k, v, rpb, more):
        return na2d(q, k, v, 3, dilation=2, rpb=rpb, additional_keys=more, additional_values=2 * more)

    np.testing.assert_allclose(run(Attend(call), q, k, v, rpb, more), call(q, k, v, rpb, more).numpy(), atol=1e-5)


@pytest.mark.parametrize("kernel", [3, 8])
def test_a_query_whose_window_is_masked_gives_zeros(kernel):
    q = torch.randn(1, 8, 8, 2, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 8, 8, dtype=torch.bool)
    mask[0, :4, :4] = False
    if kernel == 8:
        mask[:] = False

    def call(q, mask):
        return na2d(q, q, q, kernel, attn_mask=mask)

    assert (call(q, mask) == 0).any()
    np.testing.assert_allclose(run(Attend(call), q, mask), call(q, mask).numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["dinat_mini", "dinat_s_tiny"])
def test_models_with_levels_smaller_than_the_window(name):
    model = randomize(small(name))
    x = images(96, 80)
    np.testing.assert_allclose(run(model, x), model(x).detach().numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("spec", [Fibottention(), Longformer()])
def test_a_vision_transformer_made_sparse(spec):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=5, img_size=64).eval()
    sparsify(model, spec)
    x = images(64, 64)
    np.testing.assert_allclose(run(model, x), model(x).detach().numpy(), atol=1e-4)


def test_what_has_no_such_form_is_named(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    q = torch.zeros(1, 4, 20, 4)
    empty = Pattern.from_offsets([[1], [2], [0], [-3]], 20, allow_empty=True)
    with pytest.raises(ValueError, match="queries that keep no key cannot be exported"):
        sparse_attention(q, q, q, empty)
    with pytest.raises(ValueError, match="fill='zero' .* cannot be exported"):
        sparse_attention(q, q, q, wythoff(4, 20), fill="zero")
    with pytest.raises(ValueError, match="backend 'cpu' cannot be exported to ONNX"):
        sparse_attention(q, q, q, wythoff(4, 20), backend="cpu")
    with pytest.raises(ValueError, match="return_lse=True cannot be exported to ONNX"):
        na1d(q, q, q, 3, return_lse=True)

import pytest
import timm
import torch

from fibottention import Fibottention, Longformer
from fibottention.layers import PatternAttention

NAMES = [
    "fibottention_vit_tiny_patch16_224",
    "fibottention_vit_small_patch16_224",
    "fibottention_vit_base_patch16_224",
    "fibottention_swin_base_patch4_window7_224",
    "fibottention_convit_base",
]


@pytest.mark.parametrize("name", NAMES)
def test_registered_models(name):
    assert name in timm.list_models("fibottention_*")
    shrink = {"depths": (1, 1, 1, 1)} if "swin" in name else {"depth": 2}
    if "convit" in name:
        shrink["local_up_to_layer"] = 1  # after which the class token joins
    model = timm.create_model(name, num_classes=5, **shrink)
    specs = {m.spec for m in model.modules() if isinstance(m, PatternAttention)}
    assert specs == {Fibottention()}
    out = model(torch.randn(1, 3, 224, 224))
    assert out.shape == (1, 5)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    plain = timm.create_model(name.removeprefix("fibottention_"), num_classes=5, **shrink)
    plain.load_state_dict(model.state_dict())
    assert timm.get_pretrained_cfg(name).input_size == (3, 224, 224)


def test_options():
    model = timm.create_model(
        "fibottention_vit_tiny_patch16_224", attention={"name": "longformer", "window": 2}, img_size=64, in_chans=1
    )
    assert model.blocks[3].attn.sparse.spec == Longformer(window=2)
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 1000)
    model.reset_classifier(3)
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 3)
    features = timm.create_model("fibottention_vit_tiny_patch16_224", img_size=64, features_only=True)
    assert features(torch.randn(1, 3, 64, 64))[-1].shape == (1, 192, 4, 4)
    model = timm.create_model("fibottention_vit_tiny_patch16_224", attention=Fibottention(w_max=20))
    assert model.blocks[0].attn.sparse.spec == Fibottention(w_max=20)

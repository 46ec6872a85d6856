"""Weights of runs, and of transformers' models."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DinatConfig,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from fibottention.adapters.transformers import register
from fibottention.errors import UserError
from fibottention.tasks.dense.checkpoints import load_checkpoint
from tests.tasks.dense.models import MASK2FORMER, image, make, model_config

register()


def theirs(head):
    options = model_config(head).model.options
    stages = ["stage1", "stage2", "stage3", "stage4"]
    names = ("embed_dim", "depths", "num_heads", "kernel_size", "dilations")
    backbone = DinatConfig(**{n: options[n] for n in names}, out_features=stages)
    torch.manual_seed(1)
    if head == "upernet":
        config = UperNetConfig(
            backbone_config=backbone, hidden_size=16, auxiliary_channels=8, num_labels=3, auxiliary_in_channels=64
        )
        model = UperNetForSemanticSegmentation(config)
    else:
        model = Mask2FormerForUniversalSegmentation(
            Mask2FormerConfig(backbone_config=backbone, num_labels=3, **MASK2FORMER)
        )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("head", ["upernet", "mask2former_panoptic"])
def test_transformers_layout_gives_the_same_results(head, tmp_path):
    reference, model = theirs(head), make(head).eval()
    reference.save_pretrained(tmp_path)
    load_checkpoint(model, tmp_path)
    pixels = model._prepared([image(64, 96)])
    with torch.no_grad():
        expected = reference(pixels)
        found = model.head._run(model.backbone(pixels), pixels)
    key = "logits" if head == "upernet" else "masks_queries_logits"
    torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-4)
    assert expected[key].std() > 1e-3


@pytest.mark.parametrize("head", ["mask_rcnn", "cascade", "upernet", "mask2former_semantic"])
def test_other_classes_begin_anew_and_all_else_is_kept(head, tmp_path):
    from fibottention.tasks.dense.model import build_model

    source = make(head, seed=5)
    save_file({n: w.contiguous().clone() for n, w in source.state_dict().items()}, tmp_path / "best.safetensors")
    config = model_config(head)
    config.model.checkpoint = str(tmp_path / "best.safetensors")
    model, _ = build_model(config, [True] * 6)
    own, before = model.state_dict(), source.state_dict()
    kept = [name for name in own if own[name].shape == before[name].shape]
    assert len(own) - len(kept) in range(1, 13)
    for name in kept:
        assert torch.equal(own[name], before[name])


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="has neither model.safetensors nor pytorch_model.bin"):
        load_checkpoint(make("upernet"), tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="are neither of a run nor of UperNet or Mask2Former"):
        load_checkpoint(make("upernet"), tmp_path)
    theirs("upernet").save_pretrained(tmp_path / "upernet")
    with pytest.raises(UserError, match="need a NAT or DiNAT backbone, not VisionTransformer"):
        load_checkpoint(make("upernet", "vit"), tmp_path / "upernet")
    with pytest.raises(UserError, match="do not fit DenseModel"):
        load_checkpoint(make("mask2former_panoptic"), tmp_path / "upernet")

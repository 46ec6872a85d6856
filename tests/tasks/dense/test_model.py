import copy

import pytest
import torch
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.image_list import ImageList

from fibottention.errors import UserError
from fibottention.tasks.dense.config import DenseDataConfig
from fibottention.tasks.dense.heads.base import DenseHead
from fibottention.tasks.dense.model import DenseModel, build_model
from tests.tasks.dense.models import BACKBONES, CLASSES, HEADS, THINGS, image, make, model_config, scene

SIZES = [(64, 80), (56, 60), (64, 80)]


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("head", HEADS)
def test_an_image_alone_and_in_a_batch_gives_the_same(head, backbone):
    model = make(head, backbone).eval().double()  # the order of boxes depends on the last digits of their scores
    torch.manual_seed(0)
    for parameter in model.parameters():  # so that scores are not all alike
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    images = [image(*size, seed) for seed, size in enumerate(SIZES)]
    seen, predict = [], model.head.predict

    def spy(*inputs):
        found = predict(*inputs)
        seen.extend(found)
        return found

    model.head.predict = spy  # whose classes have scores, of which the model keeps the best
    with torch.no_grad():
        model.predict(images)
        together = [seen[0], seen[2], seen[1]]  # those of one size come together
        for one, found in zip(images, together, strict=True):
            seen.clear()
            model.predict([one])
            assert seen[0].keys() == found.keys()
            for name, value in seen[0].items():
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    if "scores" in together[0] and len(together[0]["scores"]) > 1:
        assert together[0]["scores"].std() > 1e-3
        assert not torch.equal(together[0]["scores"][:1], together[2]["scores"][:1])


@pytest.mark.parametrize("test_size", [None, 40, 100])
@pytest.mark.parametrize("head", HEADS)
def test_predictions_have_the_sizes_of_the_images(head, test_size):
    model = make(head).eval()
    model.data.test_size = test_size
    with torch.no_grad():
        found = model.predict([image(*size) for size in SIZES])
    for prediction, size in zip(found, SIZES, strict=True):
        key = "masks" if "masks" in prediction else "map"
        assert tuple(prediction[key].shape[-2:]) == size
        if "boxes" in prediction:
            assert (prediction["boxes"] >= 0).all()
            assert (prediction["boxes"] <= torch.tensor([size[1], size[0]] * 2)).all()
            assert len(prediction["boxes"]) == len(prediction["scores"]) == len(prediction["masks"])
            assert ((prediction["labels"] >= 0) & (prediction["labels"] < 3)).all()


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("head", HEADS)
def test_all_parameters_learn(head, backbone):
    torch.manual_seed(0)
    model = make(head, backbone).train()
    sizes = SIZES if head != "upernet" else SIZES[::2]
    losses = model([image(*size) for size in sizes], [scene(head, *size) for size in sizes])
    torch.stack(list(losses.values())).sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []
    assert all(loss.isfinite() for loss in losses.values())


@pytest.mark.parametrize("head", HEADS)
def test_images_without_objects_are_learned_from(head):
    torch.manual_seed(0)
    model = make(head).train()
    images = [image(64, 80), image(64, 80, 1)]
    losses = model(images, [scene(head, 64, 80, empty=True) for _ in images])
    total = torch.stack(list(losses.values())).sum()
    assert total.isfinite()
    total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        mixed = model(images, [scene(head, 64, 80, empty=True), scene(head, 64, 80)])
    assert all(loss.isfinite() for loss in mixed.values())


@pytest.mark.parametrize("head", HEADS)
def test_mixed_precision(head):
    torch.manual_seed(0)
    model = make(head).train()
    images, scenes = [image(64, 80), image(64, 80, 1)], [scene(head, 64, 80)] * 2
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(images, scenes)
    assert all(loss.isfinite() for loss in losses.values())
    torch.stack([loss.float() for loss in losses.values()]).sum().backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model.eval().predict(images)
        if head in ("mask_rcnn", "cascade"):
            maps = model.head._maps(model.backbone(model._prepared(images)))
            assert {value.dtype for value in maps.values()} == {torch.float32}
            assert {value.dtype for outputs in model.head.rpn.head(list(maps.values())) for value in outputs} == {
                torch.float32
            }
    for name, value in found[0].items():
        assert value.dtype in (torch.float32, torch.int64, torch.bool), name


@pytest.mark.parametrize("head", ["upernet", "mask2former_panoptic"])
def test_maps_are_not_kept(head):
    """They would keep the graph of a step, and could not be copied with the model."""
    model = make(head).train()
    sum(model([image(64, 80)] * 2, [scene(head, 64, 80)] * 2).values()).backward()
    copy.deepcopy(model)


class Stub(DenseHead):
    """The mean colour of an image as its loss; its channels as the scores of three classes."""

    def losses(self, features, pixels, size, scenes):
        return {"mean": pixels[:, 0, : size[0], : size[1]].mean((1, 2)).mean()}

    def predict(self, features, pixels, size, wanted):
        self.sizes = [*getattr(self, "sizes", []), size]
        seen = nn.functional.interpolate(pixels[..., : size[0], : size[1]], wanted, mode="bilinear")
        return [{"scores": scores} for scores in seen]


def test_losses_are_means_over_the_images():
    backbone = make("mask_rcnn").backbone
    model = DenseModel(backbone, Stub())
    images = [image(*size, seed) for seed, size in enumerate(SIZES)]
    expected = torch.stack([((i[0] / 255 - 0.485) / 0.229).mean() for i in images]).mean()
    torch.testing.assert_close(model(images, [{}] * 3)["mean"], expected)


def test_scales_and_mirrored_images_are_averaged():
    data = DenseDataConfig(target="semantic", test_size=48, max_size=100, test_scales=[0.5, 1.0, 2.0], test_flip=True)
    model = DenseModel(make("mask_rcnn").backbone, Stub(), data).eval()
    pixels = torch.zeros(3, 64, 80, dtype=torch.uint8)
    pixels[0, :, :20], pixels[1, :, 20:], pixels[2, 40:, 30:] = 255, 255, 255
    pixels[:2, 40:, 30:] = 0
    plain = DenseModel(model.backbone, Stub(), DenseDataConfig(target="semantic", test_size=None))
    expected = plain.predict([pixels])[0]["map"]
    with torch.no_grad():
        found = model.predict([pixels])[0]["map"]
    assert (found == expected).float().mean() > 0.95  # the same but for the borders
    assert expected.unique().numel() == 3
    assert model.head.sizes == [(24, 30)] * 2 + [(48, 60)] * 2 + [(96, 120)] * 2


def test_options_may_be_zero_where_that_means_something():
    for head, options in (("mask2former_instance", {"dropout": 0}), ("upernet", {"auxiliary_loss_weight": 0})):
        config = model_config(head)
        config.model.head_options |= options
        build_model(config, CLASSES, THINGS)


def test_predictions_need_no_configuration():
    model = make("upernet").eval()
    found = DenseModel(model.backbone, model.head).predict([image(64, 64)])[0]
    assert found["map"].shape == (64, 64)
    assert not make("mask_rcnn").eval().predict([image(64, 64)])[0]["boxes"].requires_grad


@pytest.mark.parametrize("first", [(40, 64), (66, 66)])
def test_the_first_image_does_not_change_what_follows(first):
    """torchvision's pools would take the strides from it."""
    pictures = [image(64, 96)]
    found = []
    for before in (first, (64, 96)):
        model = make("mask_rcnn").eval()
        nn.init.normal_(model.head.roi_heads.box_predictor.cls_score.weight, std=0.5)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.head.roi_heads.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape))
            model.predict([image(*before)])
            found.append(model.predict(pictures)[0])
            assert model.head.roi_heads.box_roi_pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    torch.testing.assert_close(found[0]["scores"], found[1]["scores"])
    torch.testing.assert_close(found[0]["boxes"], found[1]["boxes"])


def test_places_are_exact_in_mixed_precision():
    model = make("mask_rcnn").eval()
    pixels = model._prepared([image(32, 1300)])
    anchors = []
    for is_mixed in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            maps = list(model.head._maps(model.backbone(pixels)).values())
            anchors.append(model.head.rpn.anchor_generator(ImageList(pixels, [(32, 1300)]), maps)[0])
    assert torch.equal(*anchors)
    assert anchors[0].max() > 1300


def test_masks_are_counted_without_the_other_processes():
    criterion = make("mask2former_instance").head.net.criterion
    labels = [torch.zeros(2), torch.zeros(3)]
    assert criterion.get_num_masks(labels, device=torch.device("cpu")) == 5
    assert criterion.get_num_masks([torch.zeros(0)], device=torch.device("cpu")) == 1


def test_mask_rcnn_is_that_of_torchvision():
    config = model_config("mask_rcnn")
    config.model.drop_path = 0.0
    ours = build_model(config, CLASSES, THINGS)[0].eval()

    class Maps(nn.Module):
        out_channels = 16

        def forward(self, x):
            return ours.head._maps(ours.backbone(x))

    theirs = MaskRCNN(
        Maps(),
        rpn_anchor_generator=ours.head.rpn.anchor_generator,
        rpn_pre_nms_top_n_train=120,
        rpn_pre_nms_top_n_test=60,
        rpn_post_nms_top_n_train=60,
        rpn_post_nms_top_n_test=60,
        min_size=64,
        max_size=96,
        box_head=ours.head.roi_heads.box_head,
        box_predictor=ours.head.roi_heads.box_predictor,
        mask_head=ours.head.roi_heads.mask_head,
        mask_predictor=ours.head.roi_heads.mask_predictor,
    ).eval()
    theirs.rpn.head = ours.head.rpn.head
    nn.init.normal_(ours.head.roi_heads.box_predictor.cls_score.weight, std=0.5)
    pictures = [image(64, 96), image(64, 96, 1)]
    with torch.no_grad():
        found = ours.predict(pictures)
        expected = theirs([picture / 255 for picture in pictures])
    for one, other in zip(found, expected, strict=True):
        assert len(one["scores"]) > 10
        torch.testing.assert_close(one["boxes"], other["boxes"], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(one["scores"], other["scores"])
        assert torch.equal(one["labels"] + 1, other["labels"])
        assert torch.equal(one["masks"], other["masks"][:, 0] > 0.5)
    scenes = [scene("mask_rcnn", 64, 96) for _ in pictures]
    targets = [{"boxes": s["boxes"], "labels": s["labels"] + 1, "masks": s["masks"].to(torch.uint8)} for s in scenes]
    losses = []
    for proposer in (ours.head.rpn, theirs.rpn):  # the samples are drawn from here on
        proposer.register_forward_pre_hook(lambda *inputs: torch.manual_seed(3) and None)
    for model, inputs in ((ours, (pictures, scenes)), (theirs, ([p / 255 for p in pictures], targets))):
        losses.append(model.train()(*inputs))
    assert losses[0].keys() == losses[1].keys()
    for name, loss in losses[0].items():
        torch.testing.assert_close(loss, losses[1][name])


def test_cascade_by_hand():
    """Constant outputs: each stage moves a box by a tenth of its width, and scores are averaged."""
    model = make("cascade").eval()
    heads = model.head.roi_heads
    chances = torch.tensor([[0.2, 0.6, 0.1, 0.1], [0.2, 0.4, 0.3, 0.1], [0.2, 0.5, 0.2, 0.1]])

    class Constant(nn.Module):
        def __init__(self, row, weight):
            super().__init__()
            self.row, self.weight = row.log(), weight

        def forward(self, x):
            deltas = torch.tensor([0.1 * self.weight, 0, 0, 0])
            return self.row.expand(len(x), -1), deltas.expand(len(x), -1)

    for stage, row, weight in zip(heads.stages, chances, (10.0, 20.0, 30.0), strict=True):
        stage.box_predictor = Constant(row, weight)
    maps = model.head._maps(model.backbone(torch.randn(1, 3, 64, 96)))
    proposal = torch.tensor([[10.0, 10, 30, 40]])
    with torch.no_grad():
        found, losses = heads(maps, [proposal], [(64, 96)])
    assert losses == {}
    order = found[0]["labels"].argsort()
    torch.testing.assert_close(found[0]["scores"][order], torch.tensor([0.5, 0.2, 0.1]))
    torch.testing.assert_close(found[0]["boxes"], torch.tensor([[16.0, 10, 36, 40]]).expand(3, 4))
    assert found[0]["masks"].shape == (3, 1, 28, 28)


def test_stages_of_a_cascade_ask_for_more_overlap():
    stages = make("cascade").head.roi_heads.stages
    assert [stage.proposal_matcher.high_threshold for stage in stages] == [0.5, 0.6, 0.7]
    assert [stage.box_coder.weights[0] for stage in stages] == [10, 20, 30]
    torch.manual_seed(0)
    model = make("cascade").train()
    losses = model([image(64, 80)], [scene("cascade", 64, 80)])
    classified = [float(losses[f"loss_classifier_{number}"]) for number in (1, 2, 3)]
    # All but untrained, each stage's mean loss is about that of guessing among four, times its weight.
    for loss, weight in zip(classified, (1, 0.5, 0.25), strict=True):
        assert 0.3 < loss / weight < 3


def test_panoptic_segments_by_hand():
    """Three queries: a sure thing, stuff in two parts, and one that is not sure enough."""
    head = make("mask2former_panoptic").head
    masks = torch.full((4, 8, 8), -8.0)
    masks[0, :4, :4] = 8
    masks[1, 4:] = 8
    masks[2, :4, 4:] = 8
    masks[3] = 8
    classes = torch.tensor([[0.9, 0.05, 0.0, 0.05], [0, 0, 0.95, 0.05], [0, 0, 0.9, 0.1], [0.1, 0.7, 0.1, 0.1]])
    found = head._panoptic(classes, masks)
    assert found["labels"].tolist() == [0, 2]
    expected = torch.full((8, 8), 2)
    expected[:4, :4] = 1
    assert torch.equal(found["map"], expected)


def test_instances_of_queries_by_hand():
    head = make("mask2former_instance").head
    masks = torch.full((2, 8, 8), -9.0)
    masks[0, 2:5, 1:4] = 9
    classes = torch.tensor([[0.7, 0.2, 0.0, 0.1], [0.0, 0.9, 0.0, 0.1]])
    found = head._instances(classes, masks)
    assert found["labels"].tolist() == [0, 1, 2]  # the second query's mask is empty
    torch.testing.assert_close(found["scores"], torch.tensor([0.7, 0.2, 0.0]), atol=1e-3, rtol=0)
    assert found["boxes"][0].tolist() == [1, 2, 4, 5]


def test_what_has_no_weight_decay():
    names = make("mask2former_instance").no_weight_decay()
    assert "backbone.model.levels.0.blocks.0.attn.rpb" in names
    assert "head.net.model.transformer_module.queries_embedder.weight" in names
    assert not any(name.endswith("mlp.fc1.weight") for name in names)


@pytest.mark.parametrize(
    ("head", "options", "sentence"),
    [
        ("mask_rcnn", {"chanels": 3}, "model.head_options has no chanels.*channels"),
        ("mask_rcnn", {"anchor_sizes": [1, 2]}, r"anchor_sizes must be 5 numbers, got \[1, 2\]"),
        ("upernet", {"hidden": 3}, "model.head_options has no hidden.*hidden_size"),
        ("mask2former_instance", {"num_labels": 3}, "model.head_options has no num_labels"),
        ("mask_rcnn", {"channels": "x"}, "channels must be a whole number above 0, got 'x'"),
        ("mask_rcnn", {"channels": True}, "channels must be a whole number above 0, got True"),
        ("mask_rcnn", {"proposals": -3}, "proposals must be a whole number above 0, got -3"),
        ("mask_rcnn", {"anchor_sizes": 5}, "anchor_sizes must be a list of whole numbers above 0, got 5"),
        ("mask_rcnn", {"nms_threshold": 2}, "nms_threshold must be a number in 0 .. 1, got 2"),
        ("upernet", {"hidden_size": "x"}, "model.head_options"),
        ("upernet", {"auxiliary_in_channels": 3}, "model.head_options has no auxiliary_in_channels"),
        ("mask2former_instance", {"hidden_dim": 33}, "model.head_options do not fit together"),
        ("mask2former_instance", {"num_queries": 0}, "num_queries must be at least 1, got 0"),
    ],
)
def test_wrong_options_of_heads(head, options, sentence):
    config = model_config(head)
    config.model.head_options = options
    with pytest.raises(UserError, match=sentence):
        build_model(config, CLASSES, THINGS)


def test_queries_of_oneformer_begin_apart():
    """With transformers' own initial weights they are alike, and stay so."""
    module = make("oneformer_panoptic").head.net.model.transformer_module
    assert module.queries_embedder.weight.std() > 0.9

import base64
import re

import pytest
import timm
import torch
import torch.nn.functional as F

from fibottention import Fibottention, Longformer, patterns, sparse_attention, sparsify
from fibottention.analysis import masks
from fibottention.analysis.attention_maps import attention_maps, captured_attention
from fibottention.analysis.features import layer_features
from fibottention.analysis.heads import head_statistics
from fibottention.analysis.masks import draw_masks, mask_figure
from fibottention.analysis.report import write_report
from fibottention.errors import UserError
from fibottention.layers import NeighborhoodAttention2D
from fibottention.tasks.runs import train_run
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fibottention", "dense", "none"):
        config = tiny_config()
        config.attention = {"name": name}
        train_run(config, folder / name, command=f"fibottention train --attention.name {name}")
    return folder


def test_report_is_self_contained_and_complete(runs, tmp_path):
    path = write_report([runs / "fibottention", runs / "dense", runs / "none"], tmp_path / "report.html")
    html = path.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    pictures = re.findall(r"data:image/png;base64,([^\"]+)", html)
    assert len(pictures) == 1 + 3 + 2 + 3 + 3  # curves, confusion matrices, masks of the specs, maps, trivial attention
    for picture in pictures:
        assert base64.b64decode(picture).startswith(b"\x89PNG")
    for text in (
        "top-1",
        "attention pairs kept",
        "MACs of the whole model",
        "blocks.1.attn",
        "--attention.name dense",
        torch.__version__,
    ):
        assert text in html
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_report_of_a_run_that_is_not_finished(runs, tmp_path):
    import shutil

    shutil.copytree(runs / "fibottention", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "samples.json").unlink()
    html = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "No sample images were kept." in html
    with pytest.raises(UserError, match="does not exist"):
        write_report([tmp_path / "nothing"], tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_attention_maps_of_the_class_token_by_hand():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    x = torch.randn(2, 3, 64, 64)
    captured = []
    block = model.blocks[1]
    block.attn.register_forward_pre_hook(lambda m, args: captured.append(args[0]))
    with torch.no_grad():
        model(x)
    maps = attention_maps(model, x)
    assert type(model.blocks[0].attn).__name__ == "Attention", "the model is not changed"
    tokens = captured[0]
    with torch.no_grad():
        q, k, _ = block.attn.qkv(tokens).reshape(2, 17, 3, 3, 64).permute(2, 0, 3, 1, 4)
    expected = (q @ k.mT / 8).softmax(-1)[:, :, 0, 1:]
    assert maps[1].of_prefix
    assert maps[1].layer == "blocks.1.attn"
    torch.testing.assert_close(maps[1].values, expected)


def test_attention_maps_without_a_class_token_are_means_over_queries():
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_siglip_gap_224", img_size=64, depth=1).eval()
    sparsify(model, Longformer())
    captured = {}
    sparse = model.blocks[0].attn.sparse
    sparse.register_forward_pre_hook(lambda m, args: captured.update(q=args[0], k=args[1]))
    x = torch.randn(1, 3, 64, 64)
    (only,) = attention_maps(model, x)
    pattern = patterns.longformer(12, 16)
    eye = torch.eye(16).expand(1, 12, 16, 16)
    weights = sparse_attention(
        torch.cat([captured["q"]]), captured["k"], eye, pattern, backend="reference"
    )  # values that are unit vectors give the weights
    torch.testing.assert_close(only.values, weights.mean(2))
    assert not only.of_prefix


@pytest.mark.parametrize("side", [96, 32])
def test_layers_of_dinat_are_seen_as_they_attend(side):
    torch.manual_seed(0)
    options = {"depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 4], "dilations": [2, [1, 2], 1, 1]}
    model = timm.create_model("dinat_mini", embed_dim=16, kernel_size=3, **options).eval()
    images, given, layers = torch.randn(2, 3, side, side), {}, []
    for name, module in model.named_modules():
        if isinstance(module, NeighborhoodAttention2D):
            torch.nn.init.normal_(module.rpb)
            layers.append(name)
            module.proj.register_forward_pre_hook(lambda _, args, name=name: given.__setitem__(name, args[0]))
    found = captured_attention(model, images, lambda layer: (layer.name, layer.out))
    # At 32 pixels the last grid is 1 x 1, and that of the dilation 2 in the second level 4 x 4: both are padded.
    fitting = layers if side == 96 else [layers[0], layers[1]]
    assert [name for name, _ in found] == fitting
    for name, out in found:
        torch.testing.assert_close(out.transpose(1, 2).flatten(-2), given[name].flatten(1, 2))
    maps = attention_maps(model, images)
    assert [m.values.shape[-1] for m in maps][:2] == [(side // 4) ** 2, (side // 8) ** 2]
    for one in maps:
        torch.testing.assert_close(one.values.sum(-1), torch.ones(one.values.shape[:2]))
    assert len(head_statistics(model, images)) == len(layer_features(model, images)) == len(fitting)


def test_windowed_and_mixed_layers_have_no_maps():
    swin = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1))
    assert attention_maps(swin, torch.randn(1, 3, 224, 224)) == []
    cait = timm.create_model("cait_xxs24_224", img_size=64, depth=1)
    sparsify(cait, Fibottention())
    assert attention_maps(cait, torch.randn(1, 3, 64, 64)) == []


@pytest.mark.parametrize("cells", [1024, 16, 7, 3])
@pytest.mark.parametrize(
    "pattern",
    [
        patterns.wythoff(4, 50, prefix_tokens=1),
        patterns.dense(2, 33, prefix_tokens=2),
        patterns.dilated_window(3, 41, 2, [1, 2, 5], prefix_tokens=5),
        patterns.bigbird(2, 40, prefix_tokens=1),
    ],
    ids=["wythoff", "dense", "dilated", "rows"],
)
def test_cells_of_a_picture_are_dark_where_a_pair_is(pattern, cells, monkeypatch):
    monkeypatch.setattr(masks, "_LARGEST_PICTURE", cells)
    length = pattern.sequence_length
    step = -(-length // cells)
    missing = -length % step
    for head in range(pattern.stored_heads):
        mask = F.pad(pattern.mask()[head].float(), (0, missing, 0, missing))
        expected = F.max_pool2d(mask[None], step)[0] > 0
        assert torch.equal(torch.from_numpy(masks._picture(pattern, head)), expected)


@pytest.mark.parametrize(
    "pattern",
    [patterns.wythoff(12, 196, prefix_tokens=1), patterns.dense(3, 9), patterns.random(2, 2000, 0.01)],
    ids=["offsets", "shared", "large"],
)
def test_masks_are_drawn(pattern, tmp_path):
    from PIL import Image

    draw_masks(pattern, tmp_path / "mask.png", "title")
    with Image.open(tmp_path / "mask.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 200
    figure = mask_figure(pattern)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert len(shown) == pattern.stored_heads
    picture = shown[0].images[0].get_array()
    if pattern.sequence_length <= 1024:
        assert (picture == pattern.mask()[0].numpy()).all()

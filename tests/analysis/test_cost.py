import pytest
import timm

from fibottention import Dense, Fibottention, sparsify
from fibottention.analysis.cost import whole_model_macs


def vit_macs(width, depth, heads, tokens, classes, patch):
    """Closed form: embedding, qkv and projection, QK^T and AV, MLP of ratio 4, classifier."""
    layer = tokens * width * (4 * width + 8 * width) + 2 * tokens**2 * width
    return (tokens - 1) * 3 * patch**2 * width + depth * layer + width * classes


def test_whole_vit_equals_the_closed_form():
    model = timm.create_model("vit_tiny_patch16_224")
    expected = vit_macs(192, 12, 3, 197, 1000, 16)
    assert whole_model_macs(model, (3, 224, 224)) == expected
    dense = sparsify(model, Dense())
    assert whole_model_macs(model, (3, 224, 224)) == expected
    sparse = sparsify(model, Fibottention())
    assert whole_model_macs(model, (3, 224, 224)) == expected - dense.macs + sparse.macs
    assert model.blocks[0].attn.sparse.backend == "auto", "the model is not changed"


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pit_ti_224"])
def test_saving_equals_the_report_of_sparsify(name):
    model = timm.create_model(name)
    before = whole_model_macs(model, (3, 224, 224))
    report = sparsify(model, Fibottention())
    assert before - whole_model_macs(model, (3, 224, 224)) == report.dense_macs - report.macs


def test_mixed_layers_are_counted_too():
    model = timm.create_model("cait_xxs24_224", img_size=96, depth=2)
    before = whole_model_macs(model, (3, 96, 96))
    sparsify(model, Fibottention())
    assert 0 < whole_model_macs(model, (3, 96, 96)) < before

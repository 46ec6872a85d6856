"""`register`: make transformers' Auto classes use this project's models."""

from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification, DinatConfig

from fibottention.models import transformers_neighborhood as models

__all__ = ["register"]


def register() -> None:
    """Make NAT and DiNAT work in transformers, in this process.

    Afterwards ``AutoModel``, ``AutoModelForImageClassification`` and ``AutoBackbone`` give this project's classes for
    the model types ``"dinat"`` and ``"nat"``, and so do Mask2Former, OneFormer, MaskFormer and UperNet with such a
    backbone. Configurations and weights are transformers' own. Calling it again changes nothing.
    """
    AutoConfig.register("nat", models.NatConfig, exist_ok=True)
    for config, base, classifier, backbone in (
        (DinatConfig, models.DinatModel, models.DinatForImageClassification, models.DinatBackbone),
        (models.NatConfig, models.NatModel, models.NatForImageClassification, models.NatBackbone),
    ):
        AutoModel.register(config, base, exist_ok=True)
        AutoModelForImageClassification.register(config, classifier, exist_ok=True)
        AutoBackbone.register(config, backbone, exist_ok=True)

"""Average precision, mean IoU and panoptic quality, as the reference tools compute them."""

from abc import ABC, abstractmethod
from typing import Any, cast

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster

from fibottention.tasks.dense.heads import Prediction
from fibottention.tasks.dense.sources import SceneSource
from fibottention.tasks.dense.sources.base import VOID, Scene, encode_mask, scene_records

__all__ = ["DenseMetric", "InstanceMetric", "PanopticMetric", "SemanticMetric", "make_metric"]

_SIZES = ("small", "medium", "large")  # objects of up to 32, up to 96, and more pixels a side
_MATCH = 0.5  # IoU above which segments are the same, and share of a segment above which it is void


class DenseMetric(ABC):
    """A metric over images: a record per image, made where it is predicted, and numbers from the records of all.

    Args:
        source: The images.
    """

    def __init__(self, source: SceneSource) -> None:
        self.source = source

    @abstractmethod
    def record(self, prediction: Prediction, scene: Scene) -> Any:
        """What the metric needs to know of an image, as plain data.

        Args:
            prediction: What was found in it.
            scene: What is in it.
        """

    @abstractmethod
    def summarize(self, records: dict[int, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics in percent, the most important one first, and details, from the records by image."""

    def _by_class(self, values: np.ndarray[Any, Any]) -> dict[str, float | None]:
        """Values by the names of the classes, None for those that are no number."""
        return {
            name: None if np.isnan(value) else float(value)
            for name, value in zip(self.source.classes, values, strict=True)
        }


def make_metric(source: SceneSource) -> DenseMetric:
    """The metric of a source's target."""
    return {"instance": InstanceMetric, "semantic": SemanticMetric, "panoptic": PanopticMetric}[source.target](source)


class InstanceMetric(DenseMetric):
    """COCO's average precision of boxes and masks, by faster-coco-eval; crowds are ignored as COCO does."""

    def __init__(self, source: SceneSource) -> None:
        super().__init__(source)
        # Those of a file need not be sent from process to process.
        self._has_records = source.records(0) is not None

    def record(self, prediction: Prediction, scene: Scene) -> dict[str, Any]:
        """See `DenseMetric`."""
        boxes = prediction["boxes"].cpu().clone()
        boxes[:, 2:] -= boxes[:, :2]
        found = [
            {"category_id": label, "bbox": box, "score": score, "segmentation": encode_mask(mask)}
            for label, box, score, mask in zip(
                prediction["labels"].tolist(),
                boxes.tolist(),
                prediction["scores"].tolist(),
                prediction["masks"].cpu(),
                strict=True,
            )
        ]
        height, width = scene["masks"].shape[-2:]
        true = None if self._has_records else scene_records(scene)
        return {"size": (height, width), "found": found, "true": true}

    def summarize(self, records: dict[int, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        """See `DenseMetric`."""
        images, true, found = [], [], []
        for index, record in records.items():
            height, width = record["size"]
            images.append({"id": index, "height": height, "width": width})
            true += [
                {
                    "id": len(true) + place,
                    "image_id": index,
                    "category_id": entry["label"],
                    "bbox": entry["box"],
                    "segmentation": entry["segmentation"],
                    "area": entry["area"],
                    "iscrowd": int(entry["crowd"]),
                }
                for place, entry in enumerate(record["true"] or self.source.records(index) or [], 1)
            ]
            found += [{"image_id": index, **entry} for entry in record["found"]]
        categories = [{"id": number, "name": name} for number, name in enumerate(self.source.classes)]
        truth = COCO({"images": images, "annotations": true, "categories": categories})
        metrics: dict[str, float] = {}
        details: dict[str, Any] = {}
        for name, form in (("mask", "segm"), ("box", "bbox")):
            # Whether an object is small depends on what it is compared by, and reading results completes them in place.
            other = {"segm": "bbox", "bbox": "segmentation"}[form]
            results = truth.loadRes([{k: v for k, v in entry.items() if k != other} for entry in found])
            evaluation = COCOeval_faster(truth, results, iouType=cast(Any, form), print_function=lambda *words: None)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            stats = [100 * float(value) for value in evaluation.stats[:6]]
            # COCO's tools say -1 where there is no object.
            known = [value if value >= 0 else None for value in stats]
            metrics |= {f"{name}_{kind}": known[place] or 0.0 for place, kind in enumerate(("ap", "ap50", "ap75"))}
            details |= {f"{name}_ap_{size}": value for size, value in zip(_SIZES, known[3:], strict=True)}
            precision = evaluation.eval["precision"][:, :, :, 0, -1]  # overlap, recall, class
            details[f"{name}_ap_by_class"] = {
                label: _mean(100 * values[values > -1])
                for label, values in zip(self.source.classes, np.moveaxis(precision, 2, 0), strict=True)
            }
        return metrics, details


class SemanticMetric(DenseMetric):
    """Mean IoU over the classes, over all pixels that are not void."""

    def record(self, prediction: Prediction, scene: Scene) -> list[list[int]]:
        """See `DenseMetric`."""
        true, found = scene["map"].flatten().cpu(), prediction["map"].flatten().cpu()
        known = true != VOID
        true, found = true[known], found[known]
        count = len(self.source.classes)
        return [torch.bincount(part, minlength=count).tolist() for part in (true[true == found], found, true)]

    def summarize(self, records: dict[int, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        """See `DenseMetric`."""
        both, found, true = np.sum([np.asarray(record) for record in records.values()], axis=0).astype(float)
        union = found + true - both
        iou = np.divide(100 * both, union, out=np.full_like(union, np.nan), where=union > 0)
        recall = np.divide(100 * both, true, out=np.full_like(true, np.nan), where=true > 0)
        metrics = {"miou": _mean(iou) or 0.0, "pixel_accuracy": 100 * both.sum() / max(true.sum(), 1)}
        return metrics, {"mean_accuracy": _mean(recall), "iou_by_class": self._by_class(iou)}


class PanopticMetric(DenseMetric):
    """Panoptic quality (arXiv 1801.00868); void and crowds are ignored as COCO's panopticapi does."""

    def record(self, prediction: Prediction, scene: Scene) -> list[list[float]]:
        """See `DenseMetric`; per class the sum of IoU, and the numbers of true and false positives and negatives."""
        stats = np.zeros((len(self.source.classes), 4))
        true, found = scene["map"].cpu(), prediction["map"].cpu()
        true_labels, found_labels = scene["labels"].tolist(), prediction["labels"].tolist()
        crowd = scene["crowd"].tolist()
        columns = len(found_labels) + 1
        pairs = torch.bincount((true * columns + found).flatten(), minlength=(len(true_labels) + 1) * columns)
        shared = pairs.reshape(-1, columns).numpy()
        true_area, found_area = shared.sum(1), shared.sum(0)
        matched_true, matched_found = set(), set()
        for t, f in zip(*np.nonzero(shared), strict=True):
            if t == 0 or f == 0 or crowd[t - 1] or true_labels[t - 1] != found_labels[f - 1]:
                continue
            overlap = shared[t, f] / (true_area[t] + found_area[f] - shared[t, f] - shared[0, f])
            if overlap > _MATCH:
                stats[true_labels[t - 1], :2] += overlap, 1
                matched_true.add(t)
                matched_found.add(f)
        crowds = {}
        for t, label in enumerate(true_labels, 1):
            if crowd[t - 1]:
                crowds[label] = t
            elif true_area[t] and t not in matched_true:
                stats[label, 3] += 1
        for f, label in enumerate(found_labels, 1):
            if f in matched_found or not found_area[f]:
                continue
            ignored = shared[0, f] + (shared[crowds[label], f] if label in crowds else 0)
            if ignored / found_area[f] <= _MATCH:
                stats[label, 2] += 1
        return stats.tolist()

    def summarize(self, records: dict[int, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        """See `DenseMetric`."""
        overlap, hits, false, missed = np.sum([np.asarray(record) for record in records.values()], axis=0).T
        counted = hits + (false + missed) / 2
        quality = np.divide(100 * overlap, counted, out=np.full_like(counted, np.nan), where=counted > 0)
        segmentation = np.divide(100 * overlap, hits, out=np.zeros_like(hits), where=hits > 0)
        recognition = np.divide(100 * hits, counted, out=np.full_like(counted, np.nan), where=counted > 0)
        segmentation[counted == 0] = np.nan
        things = np.asarray(self.source.things)
        metrics = {"pq": _mean(quality) or 0.0}
        details = {
            "sq": _mean(segmentation),
            "rq": _mean(recognition),
            "pq_things": _mean(quality[things]),
            "pq_stuff": _mean(quality[~things]),
            "pq_by_class": self._by_class(quality),
        }
        return metrics, details


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    """Mean of those that are numbers, None if there is none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None

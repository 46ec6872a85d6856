"""Detection and segmentation."""

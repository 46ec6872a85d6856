"""Commands for detectors and segmenters."""

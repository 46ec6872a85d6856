"""Models registered with timm."""

"""Attention layers."""

from fibottention.layers.neighborhood_attention import (
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
)
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.layers.sparse_attention import SparseAttention, attention_layer

__all__ = [
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "PatternAttention",
    "SparseAttention",
    "attention_layer",
]

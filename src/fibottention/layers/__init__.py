"""Attention layers that take a spec."""

from fibottention.layers.pattern_attention import PatternAttention
from fibottention.layers.sparse_attention import SparseAttention, attention_layer

__all__ = ["PatternAttention", "SparseAttention", "attention_layer"]

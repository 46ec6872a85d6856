"""Scripted experts that record demonstrations."""

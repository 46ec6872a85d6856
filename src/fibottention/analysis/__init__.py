"""Analyses of models and runs, and the HTML report."""

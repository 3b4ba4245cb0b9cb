"""Evaluations: what a model can track, recall and predict."""

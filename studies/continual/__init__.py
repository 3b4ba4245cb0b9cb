"""Continual learning, measured: streams, methods behind one interface, metrics, a study."""

"""Every study of nestling on one small harness: `python -m studies NAME`."""

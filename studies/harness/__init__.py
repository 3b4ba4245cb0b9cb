"""What all studies share: stored runs, verdicts, tuning, pages, a training loop, a queue."""

"""The harness of all studies: stored runs, verdicts, tuning, pages, a training loop, a queue."""

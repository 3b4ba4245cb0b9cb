"""Train: data, loop, exact resume, many processes."""

"""Tasks made from a seed: strings, sequences and their targets."""

"""Level stacking: pretrained models that keep learning (section 7.3 of the paper)."""

"""Class after class: bases and their features, learners, metrics, two studies."""

"""Do the optimizers do what the paper says?"""

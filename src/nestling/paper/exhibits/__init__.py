"""Equations as plain functions, in the form the paper prints or derives them.

They are short and exact, for reading and for checking the rules, scans and layers that run fast.
One file per noun: gradient descent, backpropagation, momentum, preconditioning, Adam, AdaGrad,
delta gradient descent, sequence models, the Omega rule, and the two tasks the paper argues with.
"""

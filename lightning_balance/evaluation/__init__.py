"""Validation, test and predict: loaders cut by a token budget, exact metrics, results in the data set's order.

``plan`` cuts a whole data set (layer 0), ``sampler`` serves it (layer 1), ``run`` puts it between a user's loaders and
Lightning's loops, ``fillers`` keeps copies out of every figure, ``ordering`` and ``writer`` give results in the data
set's order (layer 2).
"""

"""Validation, test and predict: loaders cut by a token budget, exact metrics, results in the data set's order.

``plan`` cuts a whole data set (layer 0); ``sampler`` serves it, ``fillers`` and ``list_states`` keep metrics exact,
``ordering`` takes outputs apart (layer 1); ``run`` puts it all between a user's loaders and Lightning's loops,
``hooks`` says when, ``writer`` writes results (layer 2).
"""

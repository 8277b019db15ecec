"""The proofs: what people get silently wrong about a model that looks only leftward, tried on their own model and data.

`checking.py` is the place to start: the list of claims, and `check`, which tries them.
"""

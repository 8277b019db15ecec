"""What happens inside a model: recorded, changed, and measured. Nothing of it costs anything while it is off.

`sites.py` is the place to start: the names of what can be looked at.
"""

"""Choosing and producing tokens."""

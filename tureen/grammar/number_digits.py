"""The numbers of digits that JSON numbers are written with, by the rules of schemas and by guards."""

MAX_DIGITS = 20
EXACT_DIGITS = 15
"""Doubles tell decimals of this many digits apart."""

"""Texts with a class each."""
